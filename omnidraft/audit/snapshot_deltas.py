"""The difference of each snapshot to the one before it, and whether its counts agree with its offsets and the log."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

from omnidraft.audit.findings import Fault, FaultKind
from omnidraft.distill.ingest.record_disposition import Disposition
from omnidraft.ports import OVER_SHARE, PASSED_OVER, Offsets, SnapshotVersion


@dataclass(frozen=True, slots=True)
class SnapshotDelta:
    """The difference between two consecutive snapshots."""

    version: int
    start: Offsets
    """Partitions that are not named start at 0."""
    end: Offsets
    counts: Mapping[str, int]
    """Disposition -> records, by the manifests' counts; those over their tenants' share are among the learned, since
    the log does not tell where steps began."""
    passed_over: Offsets = field(default_factory=dict)
    """Partition -> the first of the offsets up to `end` that a learner that lagged passed over."""

    @property
    def num_offsets(self) -> int:
        """The number of offsets in between; negative when they went back."""
        return sum(self.end.values()) - sum(self.start.values())


def snapshot_deltas(versions: Sequence[SnapshotVersion], dispositions: Set[str]) -> tuple[SnapshotDelta, ...]:
    """Return the differences since learning last began: at the start of the log with the base drafter or a folder
    learned elsewhere, or where an operator restarted it. Damaged snapshots, which no other continues, are left out.

    Args:
        versions: oldest first.
        dispositions: names of counts that stand for one offset each; manifests count other things too.
    """
    lineage = _lineage(versions)
    begin = max((index for index, each in enumerate(lineage) if _is_beginning(lineage[:index], each)), default=0)
    return tuple(_delta(before, after, dispositions) for before, after in pairwise(lineage[begin:]))


def _lineage(versions: Sequence[SnapshotVersion]) -> list[SnapshotVersion]:
    """Return the newest snapshot and those whose offsets and counts it continues, oldest first, as far back as they
    are known."""
    lineage = list(versions[-1:])
    for each in reversed(versions[:-1]):
        manifest = lineage[0].manifest
        if (manifest.continues_id or manifest.parent_id) in (None, each.manifest.snapshot_id):
            lineage.insert(0, each)
    return lineage


def _is_beginning(before: Sequence[SnapshotVersion], version: SnapshotVersion) -> bool:
    manifest = version.manifest
    was_restarted = bool(before) and before[-1].manifest.restarts != manifest.restarts
    return not manifest.offsets or was_restarted


def _delta(before: SnapshotVersion, after: SnapshotVersion, dispositions: Set[str]) -> SnapshotDelta:
    counts = _counts(after, dispositions)
    counts.subtract(_counts(before, dispositions))
    start = before.manifest.offsets
    changed = {name: number for name, number in counts.items() if number}
    return SnapshotDelta(after.version, start, {**start, **after.manifest.offsets}, changed, after.manifest.passed_over)


def _counts(version: SnapshotVersion, dispositions: Set[str]) -> Counter[str]:
    manifest = version.manifest
    skipped = {name: number for name, number in manifest.counts.items() if name in dispositions - {OVER_SHARE}}
    num_admissible = manifest.num_records + manifest.counts.get(OVER_SHARE, 0)
    return Counter(skipped | {Disposition.LEARNED.value: num_admissible})


def compare(
    delta: SnapshotDelta, replayed: Mapping[str, int], *, num_gone: int, num_known_lost: int
) -> Iterator[Fault]:
    """Yield the contradictions between a snapshot's counts and the log.

    Args:
        replayed: disposition -> offsets of this delta, by the log.
        num_gone: offsets of this delta whose disposition is unknown, since the log lacks them or their content.
        num_known_lost: records of this delta that are reported as lost one by one.
    """
    surplus = sum(delta.counts.values()) - delta.num_offsets
    difference = Counter(delta.counts)
    difference.subtract(replayed)
    over, over_duplicates = difference[Disposition.LEARNED], difference[Disposition.DUPLICATE]
    over_passed = difference[PASSED_OVER]
    what = (
        f"{delta.num_offsets} offsets; the snapshot counts {_described(delta.counts)}, "
        f"the log says {_described(replayed)}"
    )
    if surplus < 0:
        if -surplus > num_known_lost:
            yield Fault(FaultKind.LOST, -surplus - num_known_lost, what, delta.version)
    elif num_gone and not surplus:
        return
    elif over > 0 and (surplus or over_duplicates < 0):
        yield Fault(FaultKind.LEARNED_TWICE, over, what, delta.version)
    elif over < 0 < over_duplicates:
        yield Fault(FaultKind.LOST, -over, f"dropped as duplicates: {what}", delta.version)
    elif over < 0 < over_passed:
        yield Fault(FaultKind.LOST, over_passed, f"passed over outside the range that says so: {what}", delta.version)
    elif wrong := sum(max(0, number) for number in difference.values()):
        is_held_out = over == -difference[Disposition.HELD_OUT]
        hint = "; was learner.held_out_every another?" if is_held_out else ""
        yield Fault(FaultKind.MISCOUNTED, wrong, what + hint, delta.version)


def _described(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts)) or "nothing"
