"""No pickle, and nothing else that runs what it reads, on any path that bytes take from outside into our processes."""

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omnidraft import assembly
from omnidraft.errors import SnapshotCorrupt
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.vocab.alignment import Alignment
from tests.snapshot_folders import manifest
from tests.tiny_engine import tiny_settings

ROOT = Path(__file__).parents[2]
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {"eval", "exec", "compile"}
"""Bare names; `model.eval()` and `re.compile` are others."""
UNSAFE_YAML = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}


def complaints(code: str) -> Iterator[str]:
    """What is wrong with a file, one line each."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import():
                yield from (f"imports {each.name}" for each in node.names if each.name.split(".")[0] in MODULES)
            case ast.ImportFrom() if node.module and node.module.split(".")[0] in MODULES:
                yield f"imports {node.module}"
            case ast.Call():
                yield from call_complaints(node)


def call_complaints(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    given = {each.arg: ast.unparse(each.value) for each in node.keywords}
    if called in CALLS or called in UNSAFE_YAML or called.endswith("read_pickle"):
        yield f"calls {called}"
    if called == "torch.load" and given.get("weights_only") != "True":
        yield "calls torch.load without weights_only=True"
    if called.endswith(".load") and given.get("allow_pickle", "False") != "False":
        yield f"calls {called} with allow_pickle"
    if "AutoModel" in called and called.endswith(".from_pretrained"):
        if given.get("use_safetensors") != "True" and "gguf_file" not in given:
            yield f"calls {called} without use_safetensors=True"
        if "trust_remote_code" in given:
            yield f"calls {called} with trust_remote_code"


def test_no_file_of_ours_can_unpickle_or_evaluate_anything():
    files = [path for top in ("omnidraft", "services", "pipelines") for path in sorted((ROOT / top).rglob("*.py"))]
    assert len(files) > 200
    found = {path.relative_to(ROOT).as_posix(): list(complaints(path.read_text())) for path in files}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from cloudpickle import loads",
        "import dill.detect",
        "import joblib, os",
        "import marshal as m",
        "from shelve import open",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "numpy.load(path, allow_pickle=flag)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "exec(text)",
        "pandas.read_pickle(path)",
        "AutoModelForCausalLM.from_pretrained(folder)",
        "AutoModel.from_pretrained(folder, use_safetensors=True, trust_remote_code=True)",
    ],
)
def test_the_rule_catches_a_planted_violation(code):
    assert list(complaints(code))


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "re.compile('x')",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "np.load(path)",
        "yaml.safe_load(text)",
        "AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)",
    ],
)
def test_the_rule_lets_through_what_is_safe(code):
    assert list(complaints(code)) == []


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", [bundle.DRAFTER, bundle.NGRAMS])
def test_a_worker_refuses_a_pickle_that_is_named_safetensors(
    name: str, tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its checksum is right: whoever made the snapshot meant it."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    harm, planted = tmp_path / "harm", tmp_path / "planted"
    planted.write_bytes(pickle.dumps({"w": Bomb(harm)}))
    settings = tiny_settings(tiny_models)
    told = manifest("bomb", target=settings.models.target, drafter=settings.models.drafter, train="full")
    bundle.write(tmp_path / "bomb", told, {name: planted})
    with pytest.raises(SnapshotCorrupt, match=r"\.safetensors cannot be read"):
        assembly.engine(settings, CountingMetrics(), snapshot=str(tmp_path / "bomb"))
    assert not harm.exists()
    pickle.loads(planted.read_bytes())  # the bomb is a live one
    assert harm.exists()


def test_a_distiller_refuses_a_resume_part_that_is_a_pickle(tmp_path: Path):
    harm, planted = tmp_path / "harm", tmp_path / "planted"
    planted.write_bytes(pickle.dumps(Bomb(harm)))
    bundle.write(tmp_path / "bomb", manifest("bomb"), {"resume/learner.safetensors": planted})
    with pytest.raises(SnapshotCorrupt):
        bundle.tensors(tmp_path / "bomb", "resume/learner.safetensors")
    assert not harm.exists()


def test_an_alignment_in_the_cache_that_holds_a_pickle_is_built_again(
    tiny_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    settings, harm = tiny_settings(tiny_models), tmp_path / "harm"
    assembly.vocabularies(settings)
    (cached,) = (tmp_path / "home" / "alignments").iterdir()
    with cached.open("wb") as file:
        np.savez(file, format=np.array([Bomb(harm)], dtype=object))
    assembly.vocabularies(settings)
    assert "allow_pickle" in caplog.text
    assert not harm.exists()
    Alignment.load(cached)
