"""Weights that nobody goes back to are deleted, and records that every kept snapshot has learned."""

from pathlib import Path
from typing import Any

from omnidraft.device.learning import Tidier
from omnidraft.registry.directory_registry import DirectoryRegistry
from tests.snapshot_folders import make_bundle, version_folder


def published(root: Path, num: int, offsets: list[int]) -> DirectoryRegistry:
    registry, parent = DirectoryRegistry(root / "registry", "org/small", "big", keep_resume=2), None
    for number in range(num):
        bundle = make_bundle(root, f"s{number}", offsets={0: offsets[number]} if offsets[number] else {})
        parent = registry.publish(bundle, parent).version
    return registry


def test_champion_and_the_newest_keep_their_weights_and_the_log_what_the_older_of_them_needs(tmp_path: Path) -> None:
    registry, deleted = published(tmp_path, 5, [0, 4, 8, 12, 16]), list[Any]()
    registry.promote(2)
    Tidier(registry, deleted.append, keep=2).tidy()
    folders = [version_folder(tmp_path / "registry", number) / "snapshot" for number in range(1, 6)]
    assert [(each / "serving").exists() for each in folders] == [False, True, False, True, True]
    assert len(registry.versions()) == 5, "manifests stay: the gate needs them"
    assert deleted == [{0: 12}]


def test_a_snapshot_that_has_learned_nothing_yet_keeps_the_whole_log(tmp_path: Path) -> None:
    registry, deleted = published(tmp_path, 2, [0, 4]), list[Any]()
    Tidier(registry, deleted.append, keep=2).tidy()
    Tidier(registry, deleted.append, keep=3).tidy()
    assert deleted == [{0: 0}]
