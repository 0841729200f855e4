"""The ctypes declarations of kernels/interface.h and of the functions at the end of kernels/kernels.cpp."""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

from omnidraft.errors import KernelsUnavailable
from omnidraft.models.native.build import source_digest
from omnidraft.private_files import require_unshared_file

Library = ctypes.CDLL
GROUP, BLOCK, SLOTS_TOGETHER = 32, 16, 8
"""Vectors are padded to whole groups of inputs, matrices to whole blocks of channels; keys of so many slots are
interleaved."""
RANKS_TOGETHER = 4
"""Ranks of low-rank factors are padded to multiples of this."""
MATRICES, TURNS = ("qkv", "out", "gate_up", "down", "input_gate", "input_out"), "gate_up"
"""The matrices of a layer in the order of the kernels' LayerMatrix; the one whose parts have their blocks in turns."""
LAYOUT = "12"
"""The layout of packed weights, the same for every variant of the kernels. Change it whenever `omnidraft_pack` or the
parts in weights.py change: files packed in another layout are packed anew."""
KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
PACKED = {"packed16": "bfloat16", "int8": "int8", "int4": "int4"}
"""The weight format of each precision of our own kernels."""
HEADS = {"int4": "int8"}
"""Weight formats of the head that differ from those of the other matrices: it keeps 8 bits where they have 4."""


LAYER_PARTS = (
    "norm", "post_norm", "mlp_norm", "post_mlp_norm", "post_input_norm", "post_dense_norm", "expert_norm",
    "post_expert_norm", "router_norm", "query_norm", "key_norm", "value_norm", "bias", "out_bias", "gate_up_bias",
    "down_bias", "cos", "sin", "sinks", "router", "router_bias", "choice_bias", "expert_scale", "dense_gate",
    "expert_gate_up_bias", "expert_down_bias", *MATRICES[:4], "expert_gate_up", "expert_down", *MATRICES[4:],
)  # fmt: skip
"""Addresses of a layer, null for what it has not."""
LAYER_NUMBERS = ("num_key_heads", "head_size", "mlp", "expert_mlp", "rotated", "window")
MODEL_PARTS = ("norm", "head", "embedding", "query_scale", "input_embedding", "input_projection", "input_norm")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "squared_relu", "clamped_swiglu")
_INTEGERS = (
    "num_layers", "hidden", "num_query_heads", "vocabulary", "layer_inputs", "activation", "is_gated",
    "norms_have_mean", "norms_whole", "norms_rotated", "is_parallel", "num_experts", "experts_per_row",
    "shares_are_whole", "scores_are_sigmoid",
)  # fmt: skip
_FLOATS = ("eps", "scaling", "embedding_scale", "residual_scale", "logit_scale", "score_cap", "logit_cap")
MODEL_NUMBERS = (*_INTEGERS, *_FLOATS)


class LayerStruct(Structure):
    """Addresses of one layer's weights."""

    _fields_ = [
        *((name, c_void_p) for name in LAYER_PARTS),
        *((name, c_int) for name in (*LAYER_NUMBERS, "stores_keys", "first_value")),
        ("scale", c_float),
    ]


class ModelStruct(Structure):
    """Sizes and addresses of all weights."""

    _fields_ = [
        ("kind", c_int),
        *((name, c_int) for name in _INTEGERS),
        *((name, c_float) for name in _FLOATS),
        ("layer", POINTER(LayerStruct)),
        *((name, c_void_p) for name in MODEL_PARTS),
    ]


class LayerFactorsStruct(Structure):
    """Addresses of the low-rank factors of one layer's matrices."""

    _fields_ = [("a", c_void_p * len(MATRICES)), ("b", c_void_p * len(MATRICES))]


class FactorsStruct(Structure):
    """Low-rank factors of all layers."""

    _fields_ = [("rank", c_int), ("layer", POINTER(LayerFactorsStruct))]


class TextStruct(Structure):
    """The position of one text's rows, its keys, and the factors that its rows add to the weights."""

    _fields_ = [
        ("length", c_int),
        ("capacity", c_int),
        ("parents", POINTER(c_int)),
        ("kv", c_void_p),
        ("factors", POINTER(FactorsStruct)),
        ("rotation_offset", c_int),
    ]


class PassStruct(Structure):
    """The rows of one pass, of one or more texts."""

    _fields_ = [
        *((name, c_int) for name in ("rows", "logit_rows", "capacity", "rank", "threads")),
        *((name, POINTER(c_int)) for name in ("ids", "texts", "nodes")),
        ("text", POINTER(TextStruct)),
        *((name, c_void_p) for name in ("scratch", "logits", "hidden")),
    ]


_RANKED = 128


class RankingStruct(Structure):
    """The most probable ids of a drafter, and the first target tokens that they become."""

    _fields_ = [
        *((name, c_int) for name in ("num_ids", "num_targets")),
        *((name, c_int64 * _RANKED) for name in ("ids", "targets", "firsts")),
        *((name, c_double * _RANKED) for name in ("q", "target_q")),
        ("max_logit", c_double),
    ]


def load(variant: str = "auto") -> Library:
    """Load the build of the kernels that works on this processor; see probe.choice.kernels for arguments and errors."""
    from omnidraft.models.probe.choice import kernels  # which opens what it chooses among

    return open_library(kernels(variant).library)


def bits(library: Library, precision: str) -> str:
    """Return a name of the arithmetic: with the same weights, equal names give equal bits on any processor."""
    name: bytes = library.omnidraft_bits(KINDS[PACKED.get(precision, precision)])
    return f"kernels-{source_digest()[:10]}-{name.decode()}"


def open_library(path: Path) -> Library:
    """Open a compiled library and declare its functions.

    Raises:
        KernelsUnavailable: others could have written it, it cannot be loaded, or the system refuses its instructions.
    """
    try:
        require_unshared_file(path)
    except OSError as exc:
        raise KernelsUnavailable(str(exc)) from exc
    try:
        library = Library(str(path))
    except OSError as exc:
        raise KernelsUnavailable(f"{path} cannot be loaded: {exc}; if it is damaged, delete it") from exc
    if not library.omnidraft_start():  # an int, as ctypes takes it without a declaration
        raise KernelsUnavailable(f"the system refuses {path.name}'s instructions to this process")
    signatures = {
        "packed_bytes": ([c_int, c_int, c_int], c_size_t),
        "pack": ([c_int, c_void_p, c_int, c_int, c_void_p, c_int, c_int], None),
        "linear_scratch_bytes": ([c_int, c_int], c_size_t),
        "linear": ([c_int, c_void_p, c_void_p, *(c_int,) * 3, c_void_p, c_void_p, c_int, POINTER(c_double)], None),
        "scratch_bytes": ([POINTER(ModelStruct), c_int, c_int, c_int, c_int], c_size_t),
        "forward": ([POINTER(ModelStruct), POINTER(PassStruct), POINTER(c_double)], None),
        "bits": ([c_int], c_char_p),
        "rank": ([c_void_p, c_int, c_void_p, c_int, c_int, POINTER(RankingStruct)], None),
        "move": ([POINTER(ModelStruct), c_void_p, c_int, POINTER(c_int), c_int, c_int], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, f"omnidraft_{name}")
        function.argtypes, function.restype = arguments, result
    return library
