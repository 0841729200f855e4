"""A build of llama.cpp that crashes is detected in a process of its own, once."""

import sys

import pytest

from omnidraft.errors import ModelError
from omnidraft.models.llamacpp.crash_probe import require_surviving_build
from tests.tiny_gguf import write_gguf
from tests.unit.models.tiny import tiny_model
from tests.unit.models.tiny_llamacpp import require_llamacpp


def dying(tmp_path, how: str) -> tuple[str, ...]:
    """A real process that records its run and ends as given."""
    note = f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"
    return (sys.executable, "-c", f"import os, signal, sys; {note}; {how}")


def num_runs(tmp_path) -> int:
    return len((tmp_path / "ran").read_text())


@pytest.fixture
def gguf(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL"])
def test_a_build_that_dies_is_refused_with_the_fix_and_not_tried_again(tmp_path, gguf, name):
    command = dying(tmp_path, f"os.kill(os.getpid(), signal.{name})")
    for _ in range(2):
        with pytest.raises(ModelError, match=rf"dies of {name} .*model\.gguf.*GGML_NATIVE=OFF"):
            require_surviving_build(gguf, tmp_path, command)
    assert num_runs(tmp_path) == 1


def test_a_build_that_lives_is_not_tried_again_until_the_file_is_another(tmp_path, gguf):
    command = dying(tmp_path, "sys.exit(0)")
    require_surviving_build(gguf, tmp_path, command)
    require_surviving_build(gguf, tmp_path, command)
    assert num_runs(tmp_path) == 1
    gguf.write_bytes(b"GGUF, longer")
    require_surviving_build(gguf, tmp_path, command)
    assert num_runs(tmp_path) == 2


@pytest.mark.parametrize("how", ["sys.exit('no memory left')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_trial_that_ended_otherwise_says_nothing_about_the_build(tmp_path, gguf, how):
    for _ in range(2):
        with pytest.raises(ModelError, match=r"llama\.cpp with model\.gguf could not be tried"):
            require_surviving_build(gguf, tmp_path, dying(tmp_path, how))
    assert num_runs(tmp_path) == 2


def test_this_build_lives(tmp_path):
    require_llamacpp()
    require_surviving_build(write_gguf(tiny_model("qwen2"), tmp_path / "tiny.gguf"), tmp_path)
