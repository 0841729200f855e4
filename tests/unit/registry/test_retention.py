"""Old versions lose users' text first and weights later, each part once, and nothing that an alias may need."""

import pytest

from omnidraft.ports import SnapshotVersion
from omnidraft.registry.retention import Retention
from tests.snapshot_folders import manifest

TEXT, ALL = {"resume", "memory"}, {"resume", "memory", "serving"}
FILES = {f"{part}/x.safetensors": "hash" for part in ALL}
ALIASES = {1: ("previous",), 2: ("champion",), 9: ("challenger",)}
REMOVED = {3: tuple(ALL), 5: tuple(TEXT)}


@pytest.mark.parametrize(
    ("keep_resume", "keep_serving", "expected"),
    [
        (2, 4, {1: TEXT, 4: ALL, 5: {"serving"}, 6: TEXT, 7: TEXT}),
        (2, None, {1: TEXT, 4: TEXT, 6: TEXT, 7: TEXT}),
        (3, 9, {1: TEXT, 4: TEXT, 6: TEXT}),
        (4, 1, {1: TEXT, 4: ALL, 5: {"serving"}}),
    ],
    ids=["text, then weights", "all weights stay", "no version is so old", "no text stays without its weights"],
)
def test_what_is_to_be_removed_and_still_there(keep_resume: int, keep_serving: int | None, expected: object) -> None:
    listed = [
        SnapshotVersion(
            number, manifest(sha256=FILES), ALIASES.get(number, ()), created_ms=0, removed_parts=REMOVED.get(number, ())
        )
        for number in range(1, 10)
    ]
    removable = Retention(keep_resume, keep_serving).removable(listed)
    assert {each.version: set(parts) for each, parts in removable} == expected
