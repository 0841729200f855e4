"""The report of an audit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class FaultKind(StrEnum):
    """The effect of a fault on records."""

    LOST = "lost"  # acknowledged and skipped, neither learned nor a dead letter
    LEARNED_TWICE = "learned_twice"
    MISCOUNTED = "miscounted"  # a snapshot's counts and its offsets contradict each other in another way


@dataclass(frozen=True, slots=True)
class Fault:
    """A contradiction between snapshots and the log."""

    kind: FaultKind
    num: int
    """The number of records."""
    what: str
    version: int | None = None
    """The snapshot that says so."""
    partition: int | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The figures of one partition of the trace topic."""

    partition: int
    first: int
    """The oldest offset that the log still holds; those before it cannot be checked any more."""
    offset: int
    """The newest snapshot's offset: every message before it is accounted for."""
    end: int
    fates: Mapping[str, int]
    """Disposition -> number of offsets from `first` to `offset` that should have it, by the log."""

    @property
    def num_to_learn(self) -> int:
        return max(0, self.end - self.offset)


@dataclass(frozen=True, slots=True)
class Report:
    """The findings; without faults nothing was lost and nothing learned twice."""

    version: int | None
    """The newest snapshot; None when there is none."""
    num_snapshots: int
    """The snapshots that were compared, each with the one before it."""
    partitions: tuple[PartitionReport, ...]
    faults: tuple[Fault, ...]
    num_expired: int = 0
    """Messages that the log deleted before the learner read them, by the snapshots' counts; no contradiction."""

    def num(self, kind: FaultKind) -> int:
        """Return the number of records with this fault."""
        return sum(fault.num for fault in self.faults if fault.kind is kind)

    def plain_data(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "version": self.version,
            "num_snapshots": self.num_snapshots,
            "num_expired": self.num_expired,
            "num_to_learn": sum(each.num_to_learn for each in self.partitions),
            **{f"num_{kind}": self.num(kind) for kind in FaultKind},
            "partitions": [asdict(each) | {"num_to_learn": each.num_to_learn} for each in self.partitions],
            "faults": [asdict(fault) for fault in self.faults],
        }
