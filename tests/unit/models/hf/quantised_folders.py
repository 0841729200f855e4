"""Tiny quantised folders, each format written bit by bit from its definition."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.models.native.families import family_model

GROUP = 16
AWQ_CHANNELS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The channel, of eight, whose number is in each field of a word."""

Stored = tuple[dict[str, Tensor], Tensor]
"""What is stored for a matrix, by the ends of the names, and the matrix that it means."""


class Rounded(NamedTuple):
    """Levels without sign [N, K], with a zero and a step for each group of inputs [N, G]."""

    levels: Tensor
    zeros: Tensor
    steps: Tensor
    groups: Tensor

    def weight(self) -> Tensor:
        return (self.levels - self.zeros[:, self.groups]) * self.steps[:, self.groups].float()


def rounded(weight_NK: Tensor, bits: int, *, is_symmetric: bool, is_shuffled: bool = False) -> Rounded:
    """Return levels of groups of neighbours, or of channels that belong together as act-order has them."""
    num_inputs = weight_NK.shape[1]
    groups = torch.arange(num_inputs) // GROUP
    if is_shuffled:
        groups = groups[torch.randperm(num_inputs)]
    steps, zeros = [], []
    for group in range(num_inputs // GROUP):
        part = weight_NK[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if is_symmetric:
            high = torch.maximum(high, -low)
            low = -high
        step = ((high - low) / (2**bits - 1)).half()
        steps.append(step)
        middle = torch.full_like(low, 1 << (bits - 1))
        zeros.append(middle if is_symmetric else (-low / step.float()).round().clamp(1, 2**bits - 1))
    steps_NG, zeros_NG = torch.stack(steps, 1), torch.stack(zeros, 1).int()
    levels = (weight_NK / steps_NG[:, groups].float() + zeros_NG[:, groups]).round().clamp(0, 2**bits - 1).int()
    return Rounded(levels, zeros_NG, steps_NG, groups)


def words(numbers: Tensor, bits: int) -> Tensor:
    """Pack the numbers of each row into words of 32 bits, the first into the lowest bits; the last is filled up."""
    packed = []
    for row in numbers.tolist():
        whole = sum(number << (bits * place) for place, number in enumerate(row))
        packed.append([whole >> (32 * place) & 0xFFFFFFFF for place in range(-(-len(row) * bits // 32))])
    return torch.tensor(packed, dtype=torch.uint32).view(torch.int32)


def gptq(bits: int, *, is_symmetric: bool, is_shuffled: bool = False, offset: int = 1) -> Callable[[Tensor], Stored]:
    def pack(weight_NK: Tensor) -> Stored:
        made = rounded(weight_NK, bits, is_symmetric=is_symmetric, is_shuffled=is_shuffled)
        tensors = {
            "qweight": words(made.levels, bits).T,
            "qzeros": words(made.zeros.T - offset, bits),
            "scales": made.steps.T,
            "g_idx": made.groups.int(),
        }
        return tensors, made.weight()

    return pack


def awq(weight_NK: Tensor) -> Stored:
    made = rounded(weight_NK, 4, is_symmetric=False)
    order = torch.arange(len(weight_NK)).view(-1, 8)[:, AWQ_CHANNELS].flatten()
    tensors = {
        "qweight": words(made.levels.T[:, order], 4),
        "qzeros": words(made.zeros.T[:, order], 4),
        "scales": made.steps.T,
    }
    return tensors, made.weight()


def packed(bits: int, *, is_symmetric: bool, is_shuffled: bool = False) -> Callable[[Tensor], Stored]:
    """compressed-tensors' pack-quantized."""

    def pack(weight_NK: Tensor) -> Stored:
        made = rounded(weight_NK, bits, is_symmetric=is_symmetric, is_shuffled=is_shuffled)
        tensors = {
            "weight_packed": words(made.levels, bits),
            "weight_scale": made.steps,
            "weight_shape": torch.tensor(weight_NK.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = words(made.zeros.T, bits).T
        if is_shuffled:
            tensors["weight_g_idx"] = made.groups.int()
        return tensors, made.weight()

    return pack


def whole_numbers(weight_NK: Tensor) -> Stored:
    """compressed-tensors' int-quantized, with a step and a zero for each channel."""
    step = ((weight_NK.amax(1) - weight_NK.amin(1)) / 255).bfloat16()[:, None]
    zero = (-128 - weight_NK.amin(1, keepdim=True) / step.float()).round().clamp(-128, 127).to(torch.int8)
    levels = (weight_NK / step.float() + zero).round().clamp(-128, 127).to(torch.int8)
    return (
        {"weight": levels, "weight_scale": step, "weight_zero_point": zero},
        (levels.float() - zero.float()) * step.float(),
    )


def fp8(steps: str, block: tuple[int, int] | None) -> Callable[[Tensor], Stored]:
    """Numbers of 8 bits with a step for each block, for each channel (0), or for all."""

    def pack(weight_NK: Tensor) -> Stored:
        num_outputs, num_inputs = weight_NK.shape
        high, wide = block or (num_outputs, num_inputs)
        rows, columns = torch.arange(num_outputs) // high, torch.arange(num_inputs) // wide
        scale = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
        for row, column in torch.cartesian_prod(rows.unique(), columns.unique()).tolist():
            scale[row, column] = weight_NK[rows == row][:, columns == column].abs().max() / 448
        spread = scale[rows][:, columns]
        levels = (weight_NK / spread).to(torch.float8_e4m3fn)
        extra = {} if block else {"input_scale": torch.ones(())}
        return {"weight": levels, steps: scale if block else scale.squeeze(), **extra}, levels.float() * spread

    return pack


def fp4_levels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest numbers of 4 bits as their codes, and as numbers: a sign, two bits of exponent, one more."""

    def number(code: int) -> float:
        sign, exponent, half = code >> 3, code >> 1 & 3, code & 1
        return (-1) ** sign * (half / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + half / 2))

    numbers = torch.tensor([number(code) for code in range(16)])
    codes = (weight[..., None] - numbers).abs().argmin(-1)
    return codes, numbers[codes]


def pairs(codes: Tensor) -> Tensor:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def nvfp4(weight_NK: Tensor) -> Stored:
    groups = weight_NK.unflatten(1, (-1, 16))
    whole = torch.tensor([448 * 6 / weight_NK.abs().max()])
    scale = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    step = (scale.float() / whole)[..., None]
    codes, numbers = fp4_levels(groups / step)
    tensors = {"weight_packed": pairs(codes.flatten(1)), "weight_scale": scale, "weight_global_scale": whole}
    return tensors, (numbers * step).flatten(1)


def modelopt_nvfp4(weight_NK: Tensor) -> Stored:
    tensors, weight = nvfp4(weight_NK)
    whole = 1 / tensors["weight_global_scale"][0]
    return {
        "weight": tensors["weight_packed"],
        "weight_scale": tensors["weight_scale"],
        "weight_scale_2": whole,
    }, weight


def mx(weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of 4 bits, the exponents of groups of 32, and the matrix."""
    groups = weight_NK.unflatten(1, (-1, 32))
    exponents = torch.ceil(torch.log2(groups.abs().amax(2) / 6))
    step = torch.exp2(exponents)[..., None]
    codes, numbers = fp4_levels(groups / step)
    return codes, (exponents + 127).to(torch.uint8), (numbers * step).flatten(1)


def mxfp4_packed(weight_NK: Tensor) -> Stored:
    codes, exponents, weight = mx(weight_NK)
    return {"weight_packed": pairs(codes.flatten(1)), "weight_scale": exponents}, weight


def mxfp4_experts(weight_EKN: Tensor) -> Stored:
    """gpt-oss as it is published: a row of groups for each output."""
    made = [mx(weight.T) for weight in weight_EKN]
    blocks = torch.stack([pairs(codes) for codes, _, _ in made])
    exponents = torch.stack([each for _, each, _ in made])
    return {"_blocks": blocks, "_scales": exponents}, torch.stack([weight.T for *_, weight in made])


class Case(NamedTuple):
    """A format: its settings in config.json, what writes a matrix, the matrices' names and the family of the model."""

    settings: Mapping[str, Any]
    pack: Callable[[Tensor], Stored]
    ends: tuple[str, ...] = ("proj.weight",)
    family: str = "Llama 2"


def _compressed(layout: str, **weights: Any) -> Mapping[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "version": "0.9.0"}


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "sym": True}
CASES = {
    "gptq of 4 bits": Case({**_GPTQ, "bits": 4}, gptq(4, is_symmetric=True)),
    "gptq of 8 bits": Case({**_GPTQ, "bits": 8}, gptq(8, is_symmetric=True)),
    "gptq with act-order": Case({**_GPTQ, "bits": 4}, gptq(4, is_symmetric=False, is_shuffled=True)),
    "gptq v2": Case({**_GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, is_symmetric=False, offset=0)),
    "gptq of experts": Case({**_GPTQ, "bits": 4}, gptq(4, is_symmetric=True), family="Qwen3-MoE"),
    "auto-round": Case(
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4},
        gptq(4, is_symmetric=False),
    ),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "fp8 in blocks": Case(
        {"quant_method": "fp8", "weight_block_size": [40, 24]}, fp8("weight_scale_inv", (40, 24)), family="Qwen3-MoE"
    ),
    "fp8 with one step": Case({"quant_method": "fp8", "activation_scheme": "static"}, fp8("weight_scale_inv", None)),
    "modelopt fp8": Case({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8("weight_scale", None)),
    "modelopt nvfp4": Case({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_nvfp4),
    "float-quantized": Case(_compressed("float-quantized", num_bits=8), fp8("weight_scale", (1, 96))),
    "int-quantized": Case(_compressed("int-quantized", num_bits=8), whole_numbers),
    "pack-quantized of 4 bits": Case(_compressed("pack-quantized", num_bits=4), packed(4, is_symmetric=True)),
    "pack-quantized of 8 bits": Case(_compressed("pack-quantized", num_bits=8), packed(8, is_symmetric=True)),
    "pack-quantized with zeros": Case(_compressed("pack-quantized", num_bits=4), packed(4, is_symmetric=False)),
    "pack-quantized with act-order": Case(
        _compressed("pack-quantized", num_bits=4), packed(4, is_symmetric=False, is_shuffled=True)
    ),
    "nvfp4-pack-quantized": Case(_compressed("nvfp4-pack-quantized", num_bits=4), nvfp4),
    "mxfp4-pack-quantized": Case(_compressed("mxfp4-pack-quantized", num_bits=4), mxfp4_packed),
    "mxfp4": Case({"quant_method": "mxfp4"}, mxfp4_experts, ("experts.gate_up_proj", "experts.down_proj"), "gpt-oss"),
}


def save_quantised(case: Case, folder: Path) -> Path:
    """Save a tiny model in a format, and with the weights that it means in the folder that is returned."""
    model, ordinary = family_model(case.family), folder / "ordinary"
    model.save_pretrained(ordinary)
    torch.manual_seed(1)
    stored, meant = {}, {}
    for name, tensor in load_file(ordinary / "model.safetensors").items():
        if not name.endswith(case.ends):
            stored[name] = meant[name] = tensor
            continue
        tensors, meant[name] = case.pack(tensor)
        stored |= {name.removesuffix("weight") + end: each.contiguous() for end, each in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({name: each.contiguous() for name, each in meant.items()}, ordinary / "model.safetensors")
    config = json.loads((ordinary / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": case.settings}))
    return ordinary
