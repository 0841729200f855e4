"""A trial of torch's matrix products: run as a program, in a process that may die.

It also says how number formats are compared: by the time of a token at the best number of rows.

With formats as arguments it times the products of a training step instead. A step multiplies hundreds of rows, and its
gradients multiply transposed matrices. Where the processor has no products of bfloat16, torch computes those of a few
rows quickly, since they read half the bytes, and gradients a hundred times more slowly than in float32. One thread's
processor time is compared: a machine that is busy, as at the first start of everything, made bfloat16 look twice as
slow instead of twice as fast.
Shapes: R rows, K inputs, N outputs.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from omnidraft.models.probe.subprocess_trial import report_part, report_wrong

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SHAPES = ((1, 64, 64), (1, 576, 1536), (3, 896, 4864), (16, 1536, 256), (64, 320, 96))
"""R, K, N: one row and several, sizes of real models and sizes that fill no tile."""
_MAX_ERROR = 0.02
"""Error as a share of the products' standard deviation: bfloat16 keeps 8 bits of each result."""
_MEASURED_NK = (8192, 2048)
TOKENS_OF_ROWS = {1: 1.0, 5: 2.7, 8: 3.2, 16: 3.4}
"""Tokens that a pass of so many rows emits: chains of an untrained drafter on GSM8K (algorithms.md section 10)."""
_BUDGET_S = 0.3
"""Time budget for each format and number of rows, besides a first pass for warm-up."""
_MAX_PASSES = 20
_STEP_ROWS, _STEP_NK = 256, (1536, 576)


def main(trained: Sequence[str]) -> None:
    """Measure training steps in these formats. Without any try all products, float32 first, which everything needs."""
    if trained:
        torch.set_num_threads(1)
        steps = {name: _step(FORMATS[name]) for name in trained}
        for name, seconds in fastest(steps, _STEP_ROWS, clock=time.process_time).items():
            report_part(name, seconds)
        return
    for name, dtype in FORMATS.items():
        if problem := _problem(dtype):
            report_wrong(f"{name}: {problem}")
        else:
            report_part(name, seconds_per_token({name: _layer(dtype)})[name])


def seconds_per_token(passes: Mapping[str, Callable[[int], object]]) -> dict[str, float]:
    """Return the time of one token in each format, at the number of rows that is best for it.

    The formats take turns, so that other load on the machine affects all of them.

    Args:
        passes: functions that compute one pass over a given number of rows, by the format's name.
    """
    best = dict.fromkeys(passes, float("inf"))
    for rows, tokens in TOKENS_OF_ROWS.items():
        for name, seconds in fastest(passes, rows).items():
            best[name] = min(best[name], seconds / tokens)
    return best


def _problem(dtype: torch.dtype) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, outputs in _SHAPES:
        x_RK = torch.randn(rows, inputs, generator=generator, dtype=torch.float32).to(dtype)
        weight_NK = torch.randn(outputs, inputs, generator=generator, dtype=torch.float32).to(dtype)
        expected_RN = x_RK.double() @ weight_NK.double().T
        for how, product_RN in _products(x_RK, weight_NK):
            error = float((product_RN.double() - expected_RN).std() / expected_RN.std())
            if not error < _MAX_ERROR:  # nan is wrong too
                return f"{how} of {rows} x {inputs} x {outputs} is off by {error:.2g} of its spread"
    return None


def _products(x_RK: torch.Tensor, weight_NK: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the product as a model computes it: by a linear layer, and by attention's batched product."""
    return [
        ("a linear layer", torch.nn.functional.linear(x_RK, weight_NK)),
        ("a batched product", torch.bmm(x_RK[None].expand(2, -1, -1), weight_NK.T[None].expand(2, -1, -1))[1]),
    ]


def _layer(dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
    """Return a function that computes a linear layer over a given number of random rows."""
    weight_NK = torch.randn(_MEASURED_NK, dtype=dtype)
    return lambda rows: torch.nn.functional.linear(torch.randn(rows, _MEASURED_NK[1], dtype=dtype), weight_NK)


def _step(dtype: torch.dtype) -> Callable[[int], None]:
    """Return a function that computes a linear layer over a given number of random rows, and its gradients."""
    weight_NK = torch.randn(_STEP_NK, dtype=dtype, requires_grad=True)

    def compute(rows: int) -> None:
        x_RK = torch.randn(rows, _STEP_NK[1], dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(x_RK, weight_NK).sum().backward()

    return compute


def fastest(
    passes: Mapping[str, Callable[[int], object]], rows: int, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the shortest time of each pass over so many rows; the passes take turns."""
    for compute in passes.values():
        compute(rows)
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(_MAX_PASSES):
        for name, compute in passes.items():
            if sum(times[name]) < _BUDGET_S:
                started = clock()
                compute(rows)
                times[name].append(clock() - started)
    return {name: min(each) for name, each in times.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
