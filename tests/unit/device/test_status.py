"""The gain is the sum of what each snapshot on the champion's line of descent gained, on the same records."""

import pytest

from omnidraft.device.status import Progress, progress_of
from omnidraft.ports import SnapshotVersion
from omnidraft.snapshots.manifest import Manifest
from tests.snapshot_folders import manifest


def measured(name: str, parent: str, before: float, after: float, error: float | None = 0.03) -> Manifest:
    fields = {"agreement_before": before, "agreement_after": after, "agreement_change_error": error}
    return manifest(name, parent_id=parent, **fields)


def versions(*manifests: Manifest, champion: int) -> list[SnapshotVersion]:
    numbered = enumerate(manifests, 1)
    return [SnapshotVersion(number, each, ("champion",) * (number == champion), 0) for number, each in numbered]


LINE = (
    manifest("base"),
    measured("s1", "base", 0.50, 0.60),
    measured("s2", "s1", 0.55, 0.60, 0.04),
    measured("s3", "s2", 0.60, 0.20),
)


def test_changes_add_up_to_the_champion_and_no_further() -> None:
    progress = progress_of(versions(*LINE, champion=3))
    assert progress.after == 0.60
    assert progress.before == pytest.approx(0.45)
    assert progress.gain_error == pytest.approx(0.05)


def test_without_a_measured_champion_nothing_is_claimed() -> None:
    assert progress_of([]) == progress_of(versions(*LINE, champion=1)) == Progress(None, None, None)


def test_an_error_that_is_not_known_makes_the_whole_one_unknown() -> None:
    line = (manifest("base"), measured("s1", "base", 0.5, 0.6, None), measured("s2", "s1", 0.6, 0.7))
    assert progress_of(versions(*line, champion=3)).gain_error is None
