"""What an audit found."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

UNDECIDED = "undecided"
"""Disposition of a record in a range that an earlier version sampled by a rule that is gone."""


class FaultKind(StrEnum):
    """What a fault did to records."""

    LOST = "lost"  # acknowledged, passed over, and neither learned nor kept as a dead letter
    LEARNED_TWICE = "learned_twice"
    MISCOUNTED = "miscounted"  # a snapshot's counts and its offsets contradict each other in another way


@dataclass(frozen=True, slots=True)
class Fault:
    """One contradiction."""

    kind: FaultKind
    num: int
    """Records."""
    what: str
    version: int | None = None
    """Of the snapshot that says so."""
    partition: int | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionFigures:
    """One partition of the trace topic."""

    partition: int
    first: int
    """Oldest offset that the log still holds; what was before it cannot be checked any more."""
    offset: int
    """Of the newest snapshot: everything before it is accounted for."""
    end: int
    fates: Mapping[str, int]
    """Offsets from `first` to `offset`, by what became of them as the log tells."""

    @property
    def num_to_learn(self) -> int:
        return max(0, self.end - self.offset)


@dataclass(frozen=True, slots=True)
class Report:
    """All of it; without faults nothing was lost and nothing learned twice."""

    version: int | None
    """The newest snapshot; None when there is none."""
    num_snapshots: int
    """That were compared, each with the one before it."""
    partitions: tuple[PartitionFigures, ...]
    faults: tuple[Fault, ...]
    num_expired: int = 0
    """Messages that the log had deleted before the learner came to them, as the snapshots tell: nobody learned them,
    and that is no contradiction."""

    def num(self, kind: FaultKind) -> int:
        """Records with this fault."""
        return sum(fault.num for fault in self.faults if fault.kind is kind)

    def plain_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "version": self.version,
            "num_snapshots": self.num_snapshots,
            "num_expired": self.num_expired,
            "num_to_learn": sum(each.num_to_learn for each in self.partitions),
            **{f"num_{kind}": self.num(kind) for kind in FaultKind},
            "partitions": [asdict(each) | {"num_to_learn": each.num_to_learn} for each in self.partitions],
            "faults": [asdict(fault) for fault in self.faults],
        }
