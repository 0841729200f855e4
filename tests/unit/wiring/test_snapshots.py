"""What naming a snapshot promises: a folder, a version or an alias, verified and of this pair."""

from pathlib import Path

import pytest

from omnidraft import wiring
from omnidraft.config import Settings
from omnidraft.errors import SnapshotCorrupt, SnapshotNotFound, VocabularyError
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from tests.snapshot_folders import manifest
from tests.tiny_engine import tiny_settings


@pytest.fixture
def settings(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    return tiny_settings(tiny_models, registry={"url": f"directory:///{tmp_path}/registry"})


@pytest.fixture
def folder(settings: Settings, tmp_path: Path) -> Path:
    """The base drafter with a warm n-gram cache, not published."""
    words = wiring.vocabularies(settings)
    cache = wiring.ngram_cache(settings, words, None)
    assert cache.warm(words.alignment) > 0
    told = manifest("warm", target=settings.models.target, drafter=settings.models.drafter)
    bundle.write(tmp_path / "warm", told, {bundle.NGRAMS: cache.to_arrays()})
    return tmp_path / "warm"


def test_a_folder_is_served_without_a_version(settings: Settings, folder: Path) -> None:
    held = wiring.engine(settings, CountingMetrics(), snapshot=str(folder)).engine.slot.current
    assert (held.version, held.snapshot_id) == (None, "warm")
    assert held.manifest is not None
    assert len(held.cache) > 0  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["1", "challenger", "latest"])
def test_a_version_or_alias_comes_from_the_registry(settings: Settings, folder: Path, name: str) -> None:
    wiring.registry(settings).publish(folder, None)
    held = wiring.engine(settings, CountingMetrics(), snapshot=name).engine.slot.current
    assert (held.version, held.snapshot_id) == (1, "warm")


def test_without_a_name_it_is_the_base_drafter(settings: Settings) -> None:
    held = wiring.engine(settings, CountingMetrics()).engine.slot.current
    assert (held.version, held.manifest) == (None, None)


def test_a_snapshot_that_cannot_be_used_is_refused(settings: Settings, folder: Path, tmp_path: Path) -> None:
    def load(name: str) -> None:
        wiring.engine(settings, CountingMetrics(), snapshot=name)

    with pytest.raises(SnapshotNotFound):
        load("champion")
    with pytest.raises(SnapshotCorrupt):
        load(str(tmp_path))
    foreign = wiring.ngram_cache(settings, wiring.vocabularies(settings), None).to_arrays()
    foreign["alignment"] = foreign["alignment"][::-1].copy()
    bundle.write(tmp_path / "foreign", manifest("foreign"), {bundle.NGRAMS: foreign})
    with pytest.raises(VocabularyError):
        load(str(tmp_path / "foreign"))
