"""Agreement of a drafter on records, and its gain over another one on the same records."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnidraft.distill.evaluation.agreement import share
from omnidraft.distill.evaluation.paired_error import paired_standard_error
from omnidraft.traces.record import TraceRecord


@dataclass(frozen=True, slots=True)
class PairedGain:
    """Agreement after a change, and what the change gained."""

    agreement: float
    gain: float
    gain_error: float | None
    """The standard error of the gain, an answer being one draw."""


def paired_gain(
    records: Sequence[TraceRecord], before: Sequence[np.ndarray], after: Sequence[np.ndarray]
) -> PairedGain:
    """Compare whether each position of each record agrees before and after, bool arrays by record."""
    agreement = share(after) or 0.0
    error = paired_standard_error(zip([each.request_id for each in records], before, after, strict=True))
    return PairedGain(agreement, agreement - (share(before) or 0.0), error)
