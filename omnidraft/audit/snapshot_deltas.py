"""What each snapshot says it did since the one before it, and whether its offsets bear that out."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from omnidraft.audit.findings import Fault, FaultKind
from omnidraft.distill.ingest.record_disposition import Disposition
from omnidraft.ports import Offsets, SnapshotVersion
from omnidraft.snapshots.manifest import SampledRange


@dataclass(frozen=True, slots=True)
class SnapshotDelta:
    """From one snapshot to the next."""

    version: int
    start: Offsets
    """Partitions that are not named start at 0."""
    end: Offsets
    told: Mapping[str, int]
    """Fate -> records, by the manifests' counts."""
    lag_samples: tuple[SampledRange, ...] = ()
    """The ranges that a learner which lagged learned a share of."""

    @property
    def num_offsets(self) -> int:
        """Negative when the offsets went back."""
        return sum(self.end.values()) - sum(self.start.values())


def snapshot_deltas(versions: Sequence[SnapshotVersion], fates: Set[str]) -> tuple[SnapshotDelta, ...]:
    """Since learning last began anew: at the start of the log with the base drafter or a folder learned elsewhere, or
    where an operator restarted it. Snapshots that nobody went on from are left out: they were damaged.

    Args:
        versions: oldest first.
        fates: names of counts that stand for one offset each; manifests count other things too.
    """
    line = _lineage(versions)
    begun = max((place for place, each in enumerate(line) if _is_beginning(line[:place], each)), default=0)
    return tuple(_stage(before, after, fates) for before, after in pairwise(line[begun:]))


def _lineage(versions: Sequence[SnapshotVersion]) -> list[SnapshotVersion]:
    """The newest and those that it goes on from, oldest first, as far back as they are known."""
    line = list(versions[-1:])
    for each in reversed(versions[:-1]):
        if line[0].manifest.parent_id in (None, each.manifest.snapshot_id):
            line.insert(0, each)
    return line


def _is_beginning(before: Sequence[SnapshotVersion], version: SnapshotVersion) -> bool:
    manifest = version.manifest
    was_restarted = bool(before) and before[-1].manifest.restarts != manifest.restarts
    return not manifest.offsets or was_restarted


def _stage(before: SnapshotVersion, after: SnapshotVersion, fates: Set[str]) -> SnapshotDelta:
    told = _counts(after, fates)
    told.subtract(_counts(before, fates))
    start = before.manifest.offsets
    told_apart = {name: number for name, number in told.items() if number}
    return SnapshotDelta(
        after.version, start, {**start, **after.manifest.offsets}, told_apart, after.manifest.lag_samples
    )


def _counts(version: SnapshotVersion, fates: Set[str]) -> Counter[str]:
    manifest = version.manifest
    apart = {name: number for name, number in manifest.counts.items() if name in fates}
    return Counter(apart | {Disposition.LEARNED.value: manifest.num_records})


def compare(stage: SnapshotDelta, found: Mapping[str, int], *, num_gone: int, num_known_lost: int) -> Iterator[Fault]:
    """Told against found.

    Args:
        found: fate -> offsets of this stage, as the log tells.
        num_gone: offsets of this stage that the log lacks, or whose fate depends on such, so that it is unknown.
        num_known_lost: records of this stage that are reported as lost one by one.
    """
    surplus = sum(stage.told.values()) - stage.num_offsets
    over = _difference(stage.told, found, Disposition.LEARNED)
    over_duplicates = _difference(stage.told, found, Disposition.DUPLICATE)
    over_sampled = _difference(stage.told, found, Disposition.SAMPLED_OUT)
    what = (
        f"{stage.num_offsets} offsets; the snapshot counts {_described(stage.told)}, the log says {_described(found)}"
    )
    if surplus < 0:
        if -surplus > num_known_lost:
            yield Fault(FaultKind.LOST, -surplus - num_known_lost, what, stage.version)
    elif num_gone and not surplus:
        return
    elif over > 0 and (surplus or over_duplicates < 0):
        yield Fault(FaultKind.LEARNED_TWICE, over, what, stage.version)
    elif over < 0 < over_duplicates:
        yield Fault(FaultKind.LOST, -over, f"dropped as duplicates: {what}", stage.version)
    elif over < 0 < over_sampled:
        yield Fault(FaultKind.LOST, over_sampled, f"passed over beyond the sample: {what}", stage.version)
    elif wrong := sum(max(0, _difference(stage.told, found, name)) for name in {*stage.told, *found}):
        hint = (
            "; was learner.held_out_every another?"
            if over == -_difference(stage.told, found, Disposition.HELD_OUT)
            else ""
        )
        yield Fault(FaultKind.MISCOUNTED, wrong, what + hint, stage.version)


def _difference(told: Mapping[str, int], found: Mapping[str, int], name: str) -> int:
    return told.get(name, 0) - found.get(name, 0)


def _described(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts)) or "nothing"
