"""Fingerprints tell weights apart that go by the same name."""

import os
import shutil
from pathlib import Path

import pytest

from omnidraft.errors import ModelError
from omnidraft.models.weights_name import weights_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"hidden_size": 8}')
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return made


def test_the_same_weights_have_one_digest_wherever_they_lie(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (1, 1))
    assert weights_digest(folder, tmp_path / "digests") == weights_digest(copy, tmp_path / "digests")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_one_changed_byte_is_another_digest(folder: Path, tmp_path: Path, name: str) -> None:
    before = weights_digest(folder, tmp_path / "digests")
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    assert weights_digest(folder, tmp_path / "digests") != before


def test_a_kept_digest_saves_reading_the_weights(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = weights_digest(folder, tmp_path / "digests")
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("the weights were read again"))
    assert weights_digest(folder, tmp_path / "digests") == before


@pytest.mark.parametrize("content", [b"", b"half", b"\xff" * 64, b"g" * 64])
def test_a_damaged_digest_is_made_again(folder: Path, tmp_path: Path, content: bytes) -> None:
    before = weights_digest(folder, tmp_path / "digests")
    for kept in (tmp_path / "digests").iterdir():
        kept.write_bytes(content)
    assert weights_digest(folder, tmp_path / "digests") == before
    assert {len(kept.read_text()) for kept in (tmp_path / "digests").iterdir()} == {64}


def test_a_folder_for_digests_that_cannot_be_written_costs_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "digests").write_text("a file")
    assert len(weights_digest(folder, tmp_path / "digests")) == 64
    assert "the next start has to read all of" in caplog.text


def test_other_weights_with_the_size_and_time_of_those_before_are_read(folder: Path, tmp_path: Path) -> None:
    """As `rsync --times` leaves them."""
    weights = folder / "model.safetensors"
    before, status = weights_digest(folder, tmp_path / "digests"), weights.stat()
    weights.write_bytes(bytes(status.st_size))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights_digest(folder, tmp_path / "digests") != before


def test_all_parts_of_a_gguf_file_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    before = weights_digest(parts[0], tmp_path / "digests")
    (tmp_path / "model-instruct-00001-of-00002.gguf").write_bytes(b"another model")
    assert weights_digest(parts[0], tmp_path / "digests") == before
    parts[1].write_bytes(b"other")
    assert weights_digest(parts[0], tmp_path / "digests") != before
    parts[1].unlink()
    with pytest.raises(ModelError, match="00002-of-00002"):
        weights_digest(parts[0], tmp_path / "digests")


def test_a_gguf_file_has_a_digest_and_one_that_is_gone_is_said_to_be(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert weights_digest(file, tmp_path / "digests") != weights_digest(folder, tmp_path / "digests")
    file.unlink()
    with pytest.raises(ModelError, match=r"model\.gguf"):
        weights_digest(file, tmp_path / "digests")
