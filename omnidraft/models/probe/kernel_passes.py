"""A trial of a build of our kernels: run as a program over the library's path, in a process that may die.

Whole passes of a small random model in every number format are compared with transformers' own in float32. Then the
times of packed16 and of the torch formats given after the path, which were tried before, are compared on layers as
large as those of a model with 1.5 billion weights.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from omnidraft.models.kv_session import PassSegment
from omnidraft.models.native import library as native
from omnidraft.models.native.model import NativeModel
from omnidraft.models.probe.subprocess_trial import report_part, report_wrong
from omnidraft.models.probe.torch_products import FORMATS, seconds_per_token

MAX_ERROR = {"float32": 1e-4, "packed16": 0.03, "int8": 0.08, "int4": 0.5}
"""Error as a share of the logits' standard deviation, by the rounding of each format."""
_CHUNKS = (1, 2, 3, 5, 7)
"""Rows of the passes over the text."""
_CAPACITY = 64
_SMALL: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": _CAPACITY,
    "initializer_range": 0.2,
}
_MEASURED = _SMALL | {"num_hidden_layers": 3, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12}


def main(library: Path, formats: Sequence[str]) -> None:
    """Check the numbers first, then measure the times."""
    torch.manual_seed(0)
    kernels = native.open_library(library)
    _compare(kernels)
    for name, seconds in seconds_per_token(_passes(kernels, formats)).items():
        report_part(name, seconds)


def _compare(kernels: native.Library) -> None:
    model = _model(_SMALL)
    ids = torch.randint(_SMALL["vocab_size"], (1, sum(_CHUNKS)))
    expected_V = model(input_ids=ids, use_cache=False).logits[0, -1]
    for precision, max_error in MAX_ERROR.items():
        error = float((_last_logits(model, precision, kernels, ids[0].tolist()) - expected_V).std() / expected_V.std())
        if not error < max_error:  # nan is wrong too
            report_wrong(f"{precision} is off by {error:.2g} of the logits' spread")


def _model(sizes: dict[str, Any]) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval().requires_grad_(False)


def _last_logits(model: LlamaForCausalLM, precision: str, kernels: native.Library, ids: list[int]) -> torch.Tensor:
    native_model, done = NativeModel(model, precision, kernels), 0
    backend = native_model.open(_CAPACITY)
    for size in _CHUNKS[:-1]:
        native_model.forward([PassSegment(backend, done, None, ids[done : done + size], 1)])
        done += size
    rest = ids[done:]
    return native_model.forward([PassSegment(backend, done, _chain(len(rest)), rest, len(rest))])[0][-1]


def _passes(kernels: native.Library, formats: Sequence[str]) -> dict[str, Callable[[int], object]]:
    """Return functions that compute a given number of rows, by format."""
    model = _model(_MEASURED)
    packed = NativeModel(model, "packed16", kernels, takes_all_threads=True)
    backend = packed.open(_CAPACITY)
    passes: dict[str, Callable[[int], object]] = {
        "packed16": lambda rows: packed.forward([PassSegment(backend, 0, _chain(rows), range(rows), rows)])
    }
    for name in formats:
        converted = model.to(FORMATS[name])  # type: ignore[arg-type]
        passes[name] = partial(_pass_of, converted)
    return passes


@torch.inference_mode()
def _pass_of(model: LlamaForCausalLM, rows: int) -> object:
    """Run a pass with ids and masks as our target gives them, so that transformers makes none."""
    ids, sees = torch.arange(rows)[None], torch.ones(rows, rows, dtype=torch.bool).tril()
    return model(input_ids=ids, position_ids=ids, attention_mask=sees[None, None], use_cache=False)


def _chain(rows: int) -> list[int]:
    """Return the parents of a chain as a tree."""
    return list(range(-1, rows - 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
