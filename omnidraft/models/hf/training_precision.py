"""The number format of training passes: bfloat16 where torch multiplies it right and clearly faster than float32.

Processors with AMX or AVX-512 BF16 multiply bfloat16 two to four times as fast; on others torch imitates it slowly. A
trial of a step's products decides, whose times are kept: a measurement of the moment differs under load, and two
learners of one machine would compute differently.
"""

import logging

from omnidraft.models.probe import choice
from omnidraft.ports import Precision

_FASTER = 1.5
"""Products must be so much faster: rounding the weights and converting their gradients take a tenth of a step."""

logger = logging.getLogger(__name__)


def automatic() -> Precision:
    """Return the format for a new learner on this processor."""
    seconds = choice.training_seconds()
    return "bfloat16" if _FASTER * seconds.get("bfloat16", float("inf")) < seconds["float32"] else "float32"


def usable(wanted: Precision) -> Precision:
    """Return `wanted`, or float32 with a warning where torch cannot multiply it."""
    if wanted in choice.torch_products().outcome.seconds:
        return wanted
    logger.warning("torch cannot multiply matrices in %s here, so learning goes on in float32", wanted)
    return "float32"
