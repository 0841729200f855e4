"""Old versions lose users' text first and weights later, and nothing that an alias may need."""

import pytest

from omnidraft.ports import SnapshotVersion
from omnidraft.registry.retention import Retention, superseded
from tests.snapshot_folders import manifest

FILES = {f"{part}/x.safetensors": "hash" for part in ("serving", "memory", "resume")}
TEXT, ALL = {"resume", "memory"}, {"resume", "memory", "serving"}


def versions(num: int, aliases: dict[int, str], removed: dict[int, tuple[str, ...]] | None = None):
    return [
        SnapshotVersion(
            number,
            manifest(f"s{number}", sha256=FILES),
            (aliases[number],) if number in aliases else (),
            created_ms=0,
            removed_parts=(removed or {}).get(number, ()),
        )
        for number in range(1, num + 1)
    ]


def removable(retention: Retention, each: list[SnapshotVersion]) -> dict[int, set[str]]:
    return {version.version: set(parts) for version, parts in retention.removable(each)}


def test_weights_stay_longer_than_text_and_those_with_an_alias_for_good():
    listed = versions(9, {1: "previous", 2: "champion", 9: "challenger"})
    expected = {1: TEXT, 3: ALL, 4: ALL, 5: TEXT, 6: TEXT, 7: TEXT}
    assert removable(Retention(keep_resume=2, keep_serving=5), listed) == expected
    assert [each.version for each in superseded(listed, 5)] == [3, 4]


@pytest.mark.parametrize(("keep_serving", "expected"), [(None, {1: TEXT}), (1, {1: ALL}), (9, {1: TEXT})])
def test_no_version_keeps_the_text_that_it_learns_from_without_its_weights(keep_serving, expected):
    assert removable(Retention(keep_resume=3, keep_serving=keep_serving), versions(4, {4: "challenger"})) == expected


def test_what_is_removed_already_and_what_a_version_never_had_is_not_removed_again():
    listed = versions(4, {}, {1: ("resume", "memory", "serving"), 2: ("resume", "memory")})
    listed[2] = SnapshotVersion(3, manifest("base"), (), created_ms=0)
    assert removable(Retention(keep_resume=1, keep_serving=1), listed) == {2: {"serving"}}
