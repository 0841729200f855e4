"""Quantised folders as ordinary weights: what each format stores in place of a weight, and the weight that it means.

Shapes: N output channels, K input channels, G groups of input channels, E experts.
Sources: the readers of compressed-tensors, GPTQModel, AutoAWQ and transformers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from omnidraft.errors import ModelError

Settings = Mapping[str, Any]
"""What a configuration says of its quantisation."""
Parts = Mapping[str, Tensor]
"""The tensors that are stored for one weight: its levels, and the others by the ends of their names."""
_LONGEST_SHORT_NAME = 5
"""Formats of short names are written in capitals: GPTQ, MXFP4."""
_BITS = (2, 4, 8)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight neighbours is in a word."""
_LAYOUTS = (
    None, "gptq", "gptq_v2", "gemm", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "fp8", "nvfp4",
)  # fmt: skip
_LEVELS = ("F8", "F4", "I8", "U8", "I32", "U32")
"""The types of levels in the header of a file, or how they begin."""
_LEVELS_ENDS = ("weight", "_packed", "_blocks")
_LEFT_OUT = (
    ".input_scale", ".activation_scale", ".output_scale", ".input_global_scale", ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip
"""How the names of what rounds inputs and keys end; here they keep their bits."""


class Format(NamedTuple):
    """What a format stores in place of a weight."""

    levels: str
    """How the name of its levels ends."""
    becomes: str
    """How the name of the weight ends instead."""
    others: tuple[str, ...]
    """How the names of its steps, zeros and the like end instead."""
    weight: Callable[[Parts, Settings], Tensor]


def stored_as(folder: Path, config: PreTrainedConfig) -> str | None:
    """Return the name of the format of a folder's weights; None where they are ordinary ones.

    Raises:
        ModelError: it is a format that is not read here.
    """
    settings = _settings(config)
    if settings is None or settings.get("quantization_mode") == "online":  # BitNet: rounded in each pass
        return None
    method, layout, bits = _method(settings), _layout(settings), _bits(settings)
    is_read = method in FORMATS and layout in _LAYOUTS and (bits or 8) in _BITS
    name = method.upper() if len(method) <= _LONGEST_SHORT_NAME else method
    if layout and (not is_read or layout.partition("_")[0] not in (method, "gemm")):
        name += f" ({layout})"
    if bits:
        name += f" of {bits} bits"
    if not is_read:
        raise ModelError(
            f"the weights of {folder} are {name}, which is not read here: give the model in 16 bits, in FP8, AWQ, "
            "GPTQ, MXFP4 or compressed-tensors, or as a GGUF file"
        )
    return name


def ordinary_weights(folder: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the weights of a quantised folder by their names, each computed when it is read: `weights[name][...]`.

    Raises:
        ModelError: some are stored in a way that the format does not name.
    """
    settings = _settings(config) or {}
    stored = _slices(folder)
    weights = dict(stored)
    for form in FORMATS[_method(settings)]:
        for name in stored:
            stem = name.removesuffix(form.levels)
            others = {end: stored[stem + end] for end in form.others if stem + end in stored}
            if others and name.endswith(form.levels):
                for end in (form.levels, *others):
                    del weights[stem + end]
                parts = {"levels": stored[name], **others}
                weights[stem + form.becomes] = _Computed(partial(_weight, form, parts, settings))
    _require_numbers(folder, weights)
    return {name: weight for name, weight in weights.items() if not name.endswith(_LEFT_OUT)}


def require_ordinary(folder: Path) -> None:
    """Raise ModelError where a folder has levels of a quantisation, and its configuration names none."""
    _require_numbers(folder, _slices(folder))


def _require_numbers(folder: Path, weights: Mapping[str, Any]) -> None:
    kinds = {name: each.get_dtype() for name, each in weights.items() if not isinstance(each, _Computed)}
    for name, kind in kinds.items():
        if kind.startswith(_LEVELS) and (kind[0] == "F" or name.endswith(_LEVELS_ENDS)):
            raise ModelError(
                f"{folder} has quantised weights ({name}: {kind}) in a way that its config.json does not name; give "
                "the model in 16 bits, or a GGUF file"
            )


class _Computed:
    """A weight that is computed when it is read, with the indices that a slice of a file takes."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute

    def __getitem__(self, index: Any) -> Tensor:
        return self._compute()[index]


def _weight(form: Format, slices: Mapping[str, Any], settings: Settings) -> Tensor:
    return form.weight({name: each[...] for name, each in slices.items()}, settings)


def _slices(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.startswith("consolidated"):  # the same weights under other names
            file: Any = safe_open(path, "pt")
            found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return found


def _settings(config: PreTrainedConfig) -> Settings | None:
    for each in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config", "quantization"):
            if found := getattr(each, name, None):
                return found if isinstance(found, Mapping) else dict(found.to_dict())
    return None


def _method(settings: Settings) -> str:
    method = str(settings.get("quant_method", "mlx" if "group_size" in settings else "unknown")).lower()
    packing = str(settings.get("packing_format", "")).removeprefix("auto_round:auto_")
    return packing if method == "auto-round" and packing in FORMATS else method


def _layout(settings: Settings) -> str | None:
    """Return what tells the layouts of one method apart."""
    if settings.get("transform_config"):
        return "with transforms"
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    layout = settings.get("checkpoint_format") or settings.get("format") or settings.get("quant_algo")
    if settings.get("quant_method") == "awq":
        layout = layout or settings.get("version")
    return str(layout).lower() if layout and sparsity == "dense" else None if sparsity == "dense" else sparsity


def _weight_groups(settings: Settings) -> list[Mapping[str, Any]]:
    return [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]


def _bits(settings: Settings) -> int | None:
    bits = [group.get("num_bits") for group in _weight_groups(settings)]
    bits += [settings.get("bits"), *(number for number in (4, 8) if settings.get(f"load_in_{number}bit"))]
    return max((each for each in bits if each), default=None)


def _scaled(parts: Parts, settings: Settings) -> Tensor:
    """Return levels times their steps: floating numbers of 8 or 4 bits, or whole ones, in words or not."""
    levels, zeros = parts["levels"], parts.get("_zero_point")
    if levels.dtype == torch.int32:
        outputs, inputs = parts["_shape"].tolist()[-2:]
        bits = next(each for each in _BITS if -(-inputs * each // 32) == levels.shape[-1])
        middle = 1 << (bits - 1)
        levels = unpacked(levels, bits)[..., :inputs].float() - middle
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = unpacked(zeros.mT, bits).mT[..., :outputs, :].float() - middle
    elif levels.dtype == torch.uint8 or (levels.dtype == torch.int8 and not _weight_groups(settings)):
        levels = fp4(levels.view(torch.uint8))
    levels, steps = levels.float(), _number(next(parts[end] for end in ("_scale_inv", "_scale") if end in parts))
    if (factor := parts.get("_scale_2")) is not None:
        steps = steps * factor.float()
    if (divisor := parts.get("_global_scale")) is not None:
        steps = steps / divisor.float()
    if zeros is not None:
        levels = levels - _spread(zeros.float(), levels.shape, parts, settings)
    return levels * _spread(steps, levels.shape, parts, settings)


def _number(steps: Tensor) -> Tensor:
    """Return steps as numbers; those of one byte are exponents."""
    return torch.exp2(steps.float() - 127) if steps.dtype == torch.uint8 else steps.float()


def _spread(steps: Tensor, shape: torch.Size, parts: Parts, settings: Settings) -> Tensor:
    """Return the step of each weight, or what is multiplied alike."""
    if steps.numel() == 1:
        return steps.reshape(())
    steps = steps.reshape(*steps.shape, *(1,) * (len(shape) - steps.dim()))
    groups = parts.get("_g_idx")
    if groups is not None and groups.min() >= 0:
        return steps[..., groups.long()]
    blocks = [settings.get("weight_block_size"), *(each.get("block_structure") for each in _weight_groups(settings))]
    block = next((each for each in blocks if each), (1, 1))
    for dim in (-2, -1):
        size, count = shape[dim], steps.shape[dim]
        if count not in (1, size):
            width = block[dim] if -(-size // block[dim]) == count else size // count
            steps = steps.repeat_interleave(width, dim).narrow(dim, 0, size)
    return steps


def _gptq(parts: Parts, settings: Settings) -> Tensor:
    zeros, steps_GN = parts["qzeros"], parts["scales"]
    bits = 32 * zeros.shape[1] // steps_GN.shape[1]
    if _layout(settings) != "gptq_v2":  # which alone does not store one less in each field of a word
        zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
    return _grouped(unpacked(parts["levels"].mT, bits), unpacked(zeros, bits).mT, steps_GN.mT, parts.get("g_idx"))


def _awq(parts: Parts, settings: Settings) -> Tensor:
    levels_KN, zeros_GN = (
        unpacked(parts[name], 4).unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2)
        for name in ("levels", "qzeros")
    )
    return _grouped(levels_KN.mT, zeros_GN.mT, parts["scales"].mT, None)


def _grouped(levels_NK: Tensor, zeros_NG: Tensor, steps_NG: Tensor, groups_K: Tensor | None) -> Tensor:
    num_inputs = levels_NK.shape[1]
    if groups_K is None:
        groups_K = torch.arange(num_inputs) // (num_inputs // steps_NG.shape[1])
    groups_K = groups_K.long()
    return (levels_NK.float() - zeros_NG.float()[:, groups_K]) * steps_NG.float()[:, groups_K]


def _mxfp4(parts: Parts, settings: Settings) -> Tensor:
    """Return the matrices of all experts [E, K, N], as gpt-oss has them; the format's numbers fit into bfloat16."""
    levels_ENGB, exponents_ENG = parts["levels"], parts["_scales"]
    experts, outputs, groups, num_bytes = levels_ENGB.shape
    weight = torch.empty(experts, groups * num_bytes * 2, outputs, dtype=torch.bfloat16)
    for expert in range(experts):
        steps_NG = _number(exponents_ENG[expert])
        weight[expert] = (fp4(levels_ENGB[expert]) * steps_NG[..., None]).flatten(-2).mT
    return weight


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the numbers without sign in words of 32 bits, the lowest bits first: [..., W] to [..., W * 32 / bits]."""
    found = words.contiguous().view(torch.uint8)
    if bits == 8:
        return found
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (found[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def fp4(pairs: Tensor) -> Tensor:
    """Return the numbers of 4 bits (E2M1) in bytes, that of the lower bits first: [..., B] to [..., 2 B]."""
    table = torch.tensor([*_FP4, *(-each for each in _FP4)])
    both = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=1)
    return torch.nn.functional.embedding(pairs.int(), both).flatten(-2)


_STEPS = ("_scale_inv", "_scale", "_scale_2", "_global_scale", "_zero_point", "_shape", "_g_idx")
_SCALED = (Format("", "", _STEPS, _scaled), Format("_packed", "", _STEPS, _scaled))
FORMATS: Mapping[str, tuple[Format, ...]] = {
    **dict.fromkeys(("fp8", "mxfp8", "fbgemm_fp8", "modelopt", "compressed-tensors"), _SCALED),
    "gptq": (Format("qweight", "weight", ("scales", "qzeros", "g_idx"), _gptq),),
    "awq": (Format("qweight", "weight", ("scales", "qzeros"), _awq),),
    "mxfp4": (Format("_blocks", "", ("_scales",), _mxfp4),),
}
"""By the method that a configuration names."""
