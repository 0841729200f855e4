"""A model is packed once; the file gives the same bits, and whatever is wrong with it costs time only."""

import copy
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from omnidraft.errors import ModelCorrupt
from omnidraft.models.hf.drafter import load_drafter
from omnidraft.models.hf.target import load_model, load_target
from omnidraft.models.native import library as native
from omnidraft.models.native import packed_cache, packed_file
from omnidraft.models.native.drafter import NativeDrafter, cached_drafter
from omnidraft.models.native.packed_cache import PackedCache
from omnidraft.models.native.packed_file import PackedFile, is_in_use
from omnidraft.models.native.target import NativeTarget, cached_target
from omnidraft.ports import DraftTree
from tests.unit.models.tiny import text, tiny_model

GIB = 2**30
Damage = Callable[[Path, Path], object]
"""Of a packed file, or of the folder of its model."""


both_models = pytest.mark.parametrize("source", ["qwen2", "llama"], indirect=True)


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model folder, without biases and a tied head where the parameter does not say otherwise."""
    model = copy.deepcopy(tiny_model(getattr(request, "param", "llama"))).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(tmp_path / "packed", GIB)


def load(source: Path, cache: PackedCache | None, precision: str = "int8") -> NativeTarget:
    loaded = load_target(source, name="tiny", precision=precision, cache=cache)
    assert isinstance(loaded, NativeTarget)
    return loaded


def find(source: Path, cache: PackedCache, precision: str = "int8") -> NativeTarget | None:
    return cached_target(source, name="tiny", precision=precision, kernels="auto", cache=cache)


def logits(target: NativeTarget) -> torch.Tensor:
    ids = text(40)
    session = target.open(ids, 5, "fast")
    return torch.cat([session.score(DraftTree.empty(ids[-1]))])


def packed_path(source: Path, cache: PackedCache, precision: str = "int8") -> Path:
    """The file of a model that was packed just now."""
    load(source, cache, precision)
    (path,) = cache.folder.glob(f"*-{precision}-*.safetensors")
    return path


def flip(path: Path, position: int) -> None:
    """Flip one byte, as a failing disk does: no time changes."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@both_models
@pytest.mark.parametrize("precision", native.PACKED)
def test_a_target_from_its_file_has_the_bits_of_one_packed_in_memory(source, cache, precision):
    in_memory = load(source, None, precision)
    first = load(source, cache, precision)
    second = find(source, cache, precision)
    assert second is not None
    assert torch.equal(logits(first), logits(in_memory))
    assert torch.equal(logits(second), logits(in_memory))
    assert second.fingerprint == in_memory.fingerprint
    assert (second.vocab_size, second.context_limit) == (in_memory.vocab_size, in_memory.context_limit)


@both_models
@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16", "int8"])
def test_a_base_drafter_from_its_file_has_the_bits_of_one_packed_in_memory(source, cache, precision):
    in_memory = load_drafter(source, precision, None, "full")
    assert cached_drafter(source, precision, "auto", cache) is None
    load_drafter(source, precision, None, "full", cache=cache)
    second = cached_drafter(source, precision, "auto", cache)
    assert isinstance(second, NativeDrafter)
    expected = in_memory.open().prefill_or_extend(0, text(30))
    assert np.array_equal(second.open().prefill_or_extend(0, text(30)), expected)


def test_learned_weights_are_not_cached(source, cache):
    tensors = {name: weight.detach() for name, weight in load_model(source).named_parameters()}
    load_drafter(source, "int8", tensors, "full", cache=cache)
    assert cache.files() == []


@pytest.mark.parametrize(("is_learned", "precision"), [(False, "int4"), (True, "int8")])
def test_a_drafter_has_4_bits_until_it_learned(source, is_learned, precision):
    tensors = {name: weight.detach() for name, weight in load_model(source).named_parameters()} if is_learned else None
    automatic, named = (load_drafter(source, each, tensors, "full").open() for each in ("auto", precision))
    assert np.array_equal(automatic.prefill_or_extend(0, text(30)), named.prefill_or_extend(0, text(30)))


def test_the_file_is_safetensors_and_holds_the_parts_where_the_cache_line_begins(source, cache):
    path = packed_path(source, cache)
    with safe_open(path, framework="numpy") as file:
        assert {"layers.0.qkv", "layers.2.down", "head", "embedding", "cos.all"} <= set(file.keys())
    assert all(address % 64 == 0 for address in PackedFile(path).addresses.values())


def test_a_second_start_packs_nothing_and_loads_no_transformers(source, cache):
    packed_path(source, cache)
    code = (
        "import sys; from pathlib import Path\n"
        "from omnidraft.models.native.packed_cache import PackedCache\n"
        "from omnidraft.models.native.target import cached_target\n"
        "cache = PackedCache(Path(sys.argv[2]), 2**30)\n"
        "target = cached_target(Path(sys.argv[1]), name='tiny', precision='int8', kernels='auto', cache=cache)\n"
        "print(target.vocab_size, 'transformers' in sys.modules)\n"
    )
    assert python(code, source, cache.folder).stdout.split() == ["300", "False"]


def python(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def cut(size: int) -> Damage:
    """A file that lost its end, from this position on, and no time changed."""

    def damage(path: Path, source: Path) -> None:
        status = path.stat()
        os.truncate(path, size if size >= 0 else status.st_size + size)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return damage


def written_to(path: Path, source: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")


DAMAGES: dict[str, Damage] = {
    "empty": cut(0),
    "no header": cut(5),
    "a part": cut(3000),
    "but for one byte": cut(-1),
    **{f"byte {position} flipped": lambda path, _, at=position: flip(path, at) for position in (0, 4, 100, 700)},
    "written to": written_to,
    "others may write": lambda path, _: path.chmod(0o777),
    "another configuration": lambda _, source: os.utime(source / "config.json", (1, 1)),
    "other weights": lambda _, source: os.utime(source / "model.safetensors", (1, 1)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_not_as_it_was_written_is_packed_anew_in_the_same_place(source, cache, damage):
    path = packed_path(source, cache)
    damage(path, source)
    assert find(source, cache) is None
    assert torch.equal(logits(load(source, cache)), logits(load(source, None)))
    assert cache.files() == [path]
    assert find(source, cache) is not None
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_layout_is_packed_anew_in_the_same_place(source, cache, monkeypatch):
    path = packed_path(source, cache)
    monkeypatch.setattr(native, "LAYOUT", "another")
    assert find(source, cache) is None
    load(source, cache)
    assert cache.files() == [path]


def test_a_flipped_byte_of_the_weights_is_found_by_verifying(source, cache):
    path = packed_path(source, cache)
    PackedFile(path).verify()
    flip(path, path.stat().st_size // 2)
    file = PackedFile(path)
    with pytest.raises(ModelCorrupt, match="checksum of layers"):
        file.verify()


def test_models_and_precisions_have_files_of_their_own(source, cache, tmp_path):
    shutil.copytree(source, tmp_path / "other" / "model")
    load(source, cache)
    load(source, cache, "packed16")
    load(tmp_path / "other" / "model", cache)
    assert len(cache.files()) == 3


def test_an_unreadable_file_is_packed_anew(source, cache, monkeypatch):
    packed_path(source, cache)

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("omnidraft.models.native.packed_cache.PackedFile", refused)
    assert find(source, cache) is None
    assert torch.equal(logits(load(source, cache)), logits(load(source, None)))


def test_a_folder_that_cannot_be_written_costs_time_only(source, tmp_path, caplog):
    """A file stands where the folder should: root may write into read-only folders."""
    (tmp_path / "packed").write_text("no folder")
    cache = PackedCache(tmp_path / "packed", GIB)
    assert find(source, cache) is None
    assert torch.equal(logits(load(source, cache)), logits(load(source, None)))
    assert "has to pack model again" in caplog.text


def test_a_full_disk_costs_time_only_and_leaves_nothing(source, cache, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed_file.os, "posix_fallocate", full)
    assert torch.equal(logits(load(source, cache)), logits(load(source, None)))
    assert "No space left" in caplog.text
    assert list(cache.folder.glob("*safetensors*")) + list(cache.folder.glob(".*")) == []


def test_a_file_that_the_disk_spoils_while_it_is_written_is_not_used(source, cache, monkeypatch, caplog):
    fsync = os.fsync

    def spoil(file):
        os.pwrite(file, b"spoilt", os.fstat(file).st_size - 100)
        fsync(file)

    monkeypatch.setattr(packed_file.os, "fsync", spoil)
    assert torch.equal(logits(load(source, cache)), logits(load(source, None)))
    assert "checksum of sin" in caplog.text
    assert cache.files() == []


PACK_SLOWLY = """
import sys, time
from pathlib import Path
from omnidraft.models.hf.target import load_target
from omnidraft.models.native import packed_cache, packed_file

append = packed_file._append

def slow(*arguments):
    time.sleep(0.2)
    return append(*arguments)

packed_file._append = slow
cache = packed_cache.PackedCache(Path(sys.argv[2]), 2**30)
load_target(Path(sys.argv[1]), name='tiny', precision='int8', cache=cache)
"""


@pytest.mark.timeout(300)
def test_who_waits_for_a_process_that_packs_replaces_what_it_leaves_when_it_is_killed(source, cache):
    process = subprocess.Popen([sys.executable, "-c", PACK_SLOWLY, str(source), str(cache.folder)])
    deadline = time.monotonic() + 60
    while not (partials := list(cache.folder.glob(".*.partial"))) or not partials[0].stat().st_size:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with ThreadPoolExecutor(1) as waiting:
        loading = waiting.submit(load, source, cache)
        time.sleep(0.5)
        assert not loading.done()
        assert process.poll() is None
        process.kill()
        process.wait()
        packed = loading.result()
    assert torch.equal(logits(packed), logits(load(source, None)))
    assert list(cache.folder.glob(".*.partial")) == []
    assert find(source, cache) is not None


def test_two_that_start_together_pack_once(source, cache, monkeypatch):
    write, num_packed = packed_cache.write, []

    def counted(*arguments):
        num_packed.append(1)
        time.sleep(0.2)
        return write(*arguments)

    monkeypatch.setattr(packed_cache, "write", counted)
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda _: load(source, cache), range(2)))
    assert num_packed == [1]
    assert torch.equal(logits(both[0]), logits(both[1]))


def test_partial_files_of_other_models_go_when_the_next_is_packed(source, cache):
    cache.folder.mkdir()
    left = cache.folder / ".another-int8-0.safetensors.partial"
    left.write_bytes(b"left by a killed process")
    load(source, cache)
    assert not left.exists()


def bounded(source: Path, cache: PackedCache, precisions: list[str]) -> PackedCache:
    """A cache of the same folder that holds as much as the model takes in these precisions."""
    sizes = [packed_path(source, cache, precision).stat().st_size for precision in precisions]
    return PackedCache(cache.folder, sum(sizes))


def test_the_longest_unused_file_goes_first(source, cache):
    full = bounded(source, cache, ["int8", "packed16"])
    assert find(source, full, "int8") is not None  # used after packed16, which was written later
    load(source, full, "int4")
    assert find(source, full, "packed16") is None
    assert find(source, full, "int8") is not None
    assert find(source, full, "int4") is not None


def test_a_file_in_use_is_not_deleted(source, cache):
    full = bounded(source, cache, ["int8", "packed16"])
    used = find(source, full, "int8")
    assert find(source, full, "packed16") is not None
    load(source, full, "int4")
    assert find(source, full, "packed16") is None
    assert find(source, full, "int8") is not None
    assert used is not None


def test_what_does_not_fit_costs_no_other_model_its_file(source, cache, caplog):
    kept = packed_path(source, cache, "int4")
    in_memory = load(source, PackedCache(cache.folder, kept.stat().st_size), "packed16")
    assert torch.equal(logits(in_memory), logits(load(source, None, "packed16")))
    assert "do not fit into" in caplog.text
    assert cache.files() == [kept]


def test_a_folder_that_cannot_be_read_costs_no_other_model_its_file(source, cache, caplog):
    kept, model = packed_path(source, cache, "packed16"), load_model(source)
    PackedCache(cache.folder, kept.stat().st_size).packed(source, None, model, "int4", native.load("auto"))
    assert "the folder cannot be read" in caplog.text
    assert cache.files() == [kept]


def test_a_file_that_another_process_deletes_meanwhile_makes_space_too(source, cache, monkeypatch):
    full = bounded(source, cache, ["int8", "packed16"])

    def deleted_meanwhile(path: Path) -> bool:
        path.unlink(missing_ok=True)
        return is_in_use(path)

    monkeypatch.setattr(packed_cache, "is_in_use", deleted_meanwhile)
    load(source, full, "int4")
    assert find(source, full, "int4") is not None


def test_a_file_that_another_process_deletes_while_files_are_listed_is_none(cache, monkeypatch):
    cache.folder.mkdir()
    (cache.folder / "gone.safetensors").symlink_to("nowhere")
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    assert cache.files() == []


def test_a_file_that_may_not_be_opened_is_left_alone(source, cache, monkeypatch):
    """Planted, since root may open everything; root's own files are such."""
    full, opened = bounded(source, cache, ["int8", "packed16"]), Path.open

    def refusing(path: Path, mode: str = "r", *options: Any, **more: Any) -> Any:
        if mode == "r+b" and "-int8-" in path.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, mode, *options, **more)

    monkeypatch.setattr(Path, "open", refusing)
    load(source, full, "int4")
    assert find(source, full, "int4") is not None
    assert find(source, full, "int8") is not None
    assert find(source, full, "packed16") is None


def test_a_file_is_in_use_as_long_as_it_is_mapped(source, cache):
    path = packed_path(source, cache)
    assert not is_in_use(path)
    file = PackedFile(path)
    assert is_in_use(path)
    del file
    assert not is_in_use(path)


def test_weights_are_read_into_memory_where_there_is_plenty(source, cache, monkeypatch):
    path = packed_path(source, cache)
    for available, is_mapped in ((2**40, False), (4 * path.stat().st_size, True)):
        monkeypatch.setattr(packed_file, "available_memory", lambda available=available: available)
        file = PackedFile(path)
        mapped = file.addresses
        file.copy()
        file.verify()
        assert (file.addresses == mapped) == is_mapped
        assert all(address % 64 == 0 for address in file.addresses.values())


def test_a_deleted_file_serves_those_who_have_it(source, cache):
    target = load(source, cache)
    expected = logits(target)
    shutil.rmtree(cache.folder)
    assert torch.equal(logits(target), expected)


def test_of_a_folder_into_which_others_may_write_nothing_is_mapped(source, cache, caplog):
    load(source, cache)
    cache.folder.chmod(0o777)
    for _ in range(2):
        assert find(source, cache) is None
        load(source, cache)
    assert "others may write" in caplog.text


def test_a_folder_that_changed_while_its_model_was_loaded_is_packed_anew(source: Path, cache: PackedCache) -> None:
    state, model = cache.state(source, "int8"), load_model(source)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_input_embeddings().weight.mul_(2)
    changed.save_pretrained(source)
    cache.packed(source, state, model, "int8", native.load("auto"))
    assert cache.find(source, "int8") is None
    assert torch.equal(logits(load(source, cache)), logits(load(source, None)))
