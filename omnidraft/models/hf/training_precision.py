"""The number format of a training pass: bfloat16 where torch multiplies it right and clearly faster than float32.

Processors with AMX or AVX-512 BF16 multiply bfloat16 two to four times as fast; on others torch imitates it slowly.
Shapes: R rows of a pass, K inputs, N outputs.
"""

import logging
import time
from collections.abc import Callable
from functools import cache

import torch

from omnidraft.models.probe import choice
from omnidraft.ports import Precision

_RKN = (256, 576, 1536)
_REPETITIONS = 5
_FASTER = 1.3
"""Products must be so much faster: the master weights cost memory and a pass over all weights in each step."""

logger = logging.getLogger(__name__)


def usable(wanted: Precision) -> Precision:
    """Return `wanted`, or float32 with a warning where torch cannot multiply it."""
    if wanted in choice.torch_products().outcome.seconds:
        return wanted
    logger.warning("torch cannot multiply matrices in %s here, so learning goes on in float32", wanted)
    return "float32"


@cache
def automatic() -> Precision:
    """Return the format for a new learner on this processor."""
    if "bfloat16" not in choice.torch_products().outcome.seconds:
        return "float32"
    seconds = {name: float("inf") for name in ("float32", "bfloat16")}
    steps = {name: _step(getattr(torch, name)) for name in seconds}
    for _ in range(_REPETITIONS):  # the formats take turns, so that other load on the machine affects both
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return "bfloat16" if _FASTER * seconds["bfloat16"] < seconds["float32"] else "float32"


def _step(dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that computes a layer and both of its gradients."""
    rows, inputs, outputs = _RKN
    x_RK, weight_NK, grad_RN = (
        torch.ones(shape, dtype=dtype) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )

    def step() -> None:
        for product in ((x_RK, weight_NK.T), (grad_RN, weight_NK), (grad_RN.T, x_RK)):
            torch.mm(*product)

    return step
