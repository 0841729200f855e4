"""A trial of the products of a training step: run as a program, in a process that may die.

A step multiplies hundreds of rows, and its gradients multiply transposed matrices. Where the processor has no products
of bfloat16, torch computes those of a few rows quickly, since they read half the bytes, and gradients a hundred times
more slowly than in float32.
One thread's processor time is compared: a machine that is busy, as at the first start of everything, made bfloat16 look
twice as slow instead of twice as fast.
Shapes: R rows, K inputs, N outputs.
"""

import sys
import time
from collections.abc import Callable

import torch

from omnidraft.models.probe.subprocess_trial import report_part
from omnidraft.models.probe.torch_products import FORMATS, fastest

_NUM_ROWS = 256
_MEASURED_NK = (1536, 576)


def main() -> None:
    """Measure the formats that are named as arguments."""
    torch.set_num_threads(1)
    steps = {name: _step(FORMATS[name]) for name in sys.argv[1:]}
    for name, seconds in fastest(steps, _NUM_ROWS, clock=time.process_time).items():
        report_part(name, seconds)


def _step(dtype: torch.dtype) -> Callable[[int], None]:
    """Return a function that computes a linear layer over a given number of random rows, and its gradients."""
    weight_NK = torch.randn(_MEASURED_NK, dtype=dtype, requires_grad=True)

    def compute(num_rows: int) -> None:
        x_RK = torch.randn(num_rows, _MEASURED_NK[1], dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(x_RK, weight_NK).sum().backward()

    return compute


if __name__ == "__main__":
    main()
