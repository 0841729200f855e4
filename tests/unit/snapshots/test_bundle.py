"""A snapshot folder is whole, checked, and never leaves its place."""

import numpy as np
import pytest
import torch

from omnidraft.errors import SnapshotCorrupt, SnapshotError, StorageError
from omnidraft.snapshots import bundle
from tests.snapshot_folders import make_bundle, manifest


def test_what_was_written_is_read_back(tmp_path):
    folder = make_bundle(tmp_path)
    assert bundle.verify(folder, ["serving", "resume"]).snapshot_id == "s1"
    assert bundle.ngrams(folder)["keys"].tolist() == [0, 1, 2]
    assert bundle.serving_tensors(folder)["w"].dtype == torch.float32


def test_half_precision_and_strided_tensors_keep_their_values(tmp_path):
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T
    array = np.arange(6).reshape(2, 3).T
    bundle.write(tmp_path / "s", manifest(), {"resume/a.safetensors": {"t": tensor, "n": array}})
    read = bundle.tensors(tmp_path / "s", "resume/a.safetensors")
    assert torch.equal(read["t"], tensor)
    assert read["n"].numpy().tolist() == array.tolist()


def test_a_file_given_as_a_part_is_not_copied(tmp_path):
    source = tmp_path / "weights"
    source.write_bytes(b"x")
    bundle.write(tmp_path / "s", manifest(), {"resume/weights": source})
    assert (tmp_path / "s/resume/weights").stat().st_ino == source.stat().st_ino


def test_a_written_folder_is_never_written_again(tmp_path):
    make_bundle(tmp_path)
    with pytest.raises(SnapshotError, match="exists"):
        make_bundle(tmp_path)


def test_a_write_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(StorageError, match="absent"):
        bundle.write(tmp_path / "s", manifest(), {"serving/a": tmp_path / "absent"})
    assert list(tmp_path.iterdir()) == []


def flip_a_byte(folder):
    path = folder / bundle.DRAFTER
    path.write_bytes(path.read_bytes()[:-1] + b"?")


BROKEN = {
    "changed": flip_a_byte,
    "missing": lambda folder: (folder / bundle.DRAFTER).unlink(),
    "unlisted": lambda folder: (folder / "serving/more").write_bytes(b""),
    "a link": lambda folder: [(folder / bundle.DRAFTER).unlink(), (folder / bundle.DRAFTER).symlink_to("/etc/hosts")],
}


@pytest.mark.parametrize("break_it", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_serving_part_is_refused_and_the_resume_part_is_not(tmp_path, break_it):
    folder = make_bundle(tmp_path)
    break_it(folder)
    with pytest.raises(SnapshotCorrupt, match="serving"):
        bundle.verify(folder, ["serving"])
    bundle.verify(folder, ["resume"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"snapshot_id": 1}'])
def test_what_is_no_manifest_is_refused(tmp_path, text):
    (tmp_path / bundle.MANIFEST).write_text(text)
    with pytest.raises(SnapshotCorrupt):
        bundle.read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "serving/../../x", "serving//x", "x", "", "serving\\..\\x"])
def test_a_name_that_leaves_the_folder_is_refused_in_and_out(tmp_path, name):
    with pytest.raises(SnapshotError):
        bundle.write(tmp_path / "s", manifest(), {name: {"a": np.zeros(1)}})
    with pytest.raises(SnapshotCorrupt):
        bundle.parse_manifest(manifest(sha256={name: "0"}).model_dump_json())


def test_a_truncated_tensor_file_is_corrupt(tmp_path):
    folder = make_bundle(tmp_path)
    (folder / bundle.DRAFTER).write_bytes(b"\x08")
    (folder / bundle.NGRAMS).write_bytes(b"")
    with pytest.raises(SnapshotCorrupt):
        bundle.serving_tensors(folder)
    with pytest.raises(SnapshotCorrupt):
        bundle.ngrams(folder)
