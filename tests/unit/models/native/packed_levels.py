"""Quantised weights read back from their packed bytes, written from the layout's description alone.

Shapes: N outputs, K inputs, B blocks of 16 channels, G groups of inputs.
"""

import torch

from omnidraft.models.native import library as native
from omnidraft.models.native.matrix import address_of, memory, pack
from omnidraft.models.probe.choice import kernels as chosen_kernels

HEADER_BYTES = 2 * 2 * native.BLOCK
GROUP_SIZES = {"int8": 128, "int4": 32}
MAX_LEVELS = {"int8": 255, "int4": 15}


def rounds_inputs() -> bool:
    """Return whether the inputs of bfloat16 weights are bfloat16, too."""
    return chosen_kernels().variant == "avx512_bf16"


def packed(weight_NK: torch.Tensor, kind: str, kernels: native.Library) -> bytes:
    """Return the bytes of a packed matrix."""
    number = native.KINDS[kind]
    block = memory(kernels.omnidraft_packed_bytes(number, *weight_NK.shape))
    pack(kernels, number, weight_NK, address_of(block))
    return block[:]


def unpacked(weight_NK: torch.Tensor, kind: str, kernels: native.Library) -> torch.Tensor:
    """Return the weights that the kernels compute with."""
    groups = -(-weight_NK.shape[1] // GROUP_SIZES[kind])
    data = torch.frombuffer(bytearray(packed(weight_NK, kind, kernels)), dtype=torch.uint8)
    data = data.view(-(-weight_NK.shape[0] // native.BLOCK), groups, -1)
    header = data[..., :HEADER_BYTES].contiguous().view(torch.float16).double().view(*data.shape[:2], 2, 16)
    step, minimum = header[:, :, 0, :, None], header[:, :, 1, :, None]
    levels_BGCI = data[..., HEADER_BYTES:].view(*data.shape[:2], -1, 16, 4).transpose(2, 3).flatten(3)
    if kind == "int4":
        levels_BGCI = torch.cat([levels_BGCI & 15, levels_BGCI >> 4], dim=-1)
    made = (minimum + step * levels_BGCI).transpose(1, 2).flatten(2).flatten(0, 1)
    return made[: weight_NK.shape[0], : weight_NK.shape[1]]


def full_range(weight_NK: torch.Tensor, kind: str) -> torch.Tensor:
    """Return weights rounded to equal steps from the least to the largest of each group."""
    out_NK, size, levels = weight_NK.clone(), GROUP_SIZES[kind], MAX_LEVELS[kind]
    for start in range(0, weight_NK.shape[1], size):
        group = weight_NK[:, start : start + size]
        least = group.amin(1, keepdim=True).half().float()
        step = ((group.amax(1, keepdim=True) - least).clamp(min=0) / levels).half().float()
        level = ((group - least) / step.where(step > 0, 1)).round().clamp(0, levels)
        out_NK[:, start : start + size] = least + level * step
    return out_NK
