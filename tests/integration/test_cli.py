"""What the command line promises: it works on a tiny pair, tells of its start, and refuses in one line, exit code 2."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from omnidraft import assembly
from omnidraft.errors import VocabularyError
from tests.cli_runs import run_cli
from tests.snapshot_folders import make_bundle
from tests.tiny_engine import tiny_settings
from tests.warm_cache import warmed

ROOT = Path(__file__).parents[2]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def omnidraft(
    settings_file: Path,
    omnidraft_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run the command in this process, with more environment or another file where a test gives it."""
    monkeypatch.chdir(settings_file.parent)
    for name, value in environment(omnidraft_home).items():
        monkeypatch.setenv(name, value)

    def run(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        own = () if "--config" in arguments else ("--config", settings_file)
        return run_cli((*arguments, *own), monkeypatch, capsys, environ)

    return run


def environment(home: Path) -> dict[str, str]:
    ours = {"HOME": str(home), "OMNIDRAFT_HOME": str(home), "PYTHONPATH": str(ROOT)}
    return ours | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def assert_refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("omnidraft: ")
    assert words in done.stderr


def test_generate_answers_and_says_what_drafting_gained(
    omnidraft: Run, settings_file: Path, omnidraft_home: Path
) -> None:
    asked = ("generate", "--prompt", "How many clips?", "--seed", "7", "--temperature", "1", "--max-new-tokens", "12")
    command = [sys.executable, "-m", "omnidraft.cli", *asked, "--config", str(settings_file)]
    environ = os.environ | environment(omnidraft_home)
    drafted = subprocess.run(
        command, capture_output=True, text=True, env=environ, cwd=settings_file.parent, check=False
    )
    plain = omnidraft(*asked, "--num-draft-tokens", 0, "--no-stream")
    assert (drafted.returncode, plain.returncode) == (0, 0), drafted.stderr + plain.stderr
    assert drafted.stdout == plain.stdout
    assert drafted.stdout.strip()
    first, *_, figures = drafted.stderr.splitlines()  # a pipe is told of each stage, as a terminal is
    assert first == "omnidraft: loading libraries"
    assert "tokens/s" in figures
    assert "agreement -" in plain.stderr.splitlines()[-1]


def test_a_terminal_is_told_every_stage_of_a_start(
    settings_file: Path, tiny_models: tuple[Path, Path], tmp_path: Path, omnidraft_home: Path
) -> None:
    asked = ("generate", "--config", str(settings_file), "--prompt", "How many clips?", "--max-new-tokens", "2")
    lines: list[str] = []
    command, ours, terminal = [sys.executable, "-m", "omnidraft.cli", *asked], *pty.openpty()
    env = os.environ | environment(omnidraft_home)
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=terminal):
        os.close(terminal)
        with os.fdopen(ours) as screen, contextlib.suppress(OSError):  # a terminal that its last program closed
            for line in screen:
                if said := line.partition("omnidraft: ")[2].strip():  # else it is of a progress bar
                    lines.append(said)
    target, drafter = tiny_models
    once = ("aligning", "trying", "compil", "pack", "our kernels", "torch")
    assert [line for line in lines if not line.startswith(once)] == [
        "loading libraries",
        f"reading the tokenizers of {target} and {drafter}",
        f"loading {target}",
        "measuring costs on this machine (reproducible), up to 10 s if nothing else computes here",
        f"loading {drafter}",
        f"measuring costs on this machine (steps of {drafter} in float32), up to 10 s if nothing else computes here",
        "reading the prompt",
    ]


def test_generate_keeps_to_a_pattern_and_to_a_schema(omnidraft: Run, tmp_path: Path) -> None:
    asked = ("generate", "--prompt", "How many clips?", "--no-stream", "--max-new-tokens", 40)
    assert omnidraft(*asked, "--regex", "(1|2)clips").stdout in ("1clips\n", "2clips\n")
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["many", "few"]}')
    assert json.loads(omnidraft(*asked, "--json-schema", schema, "--temperature", 1).stdout) in ("many", "few")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "x", "--target", "no-such-model"), "no-such-model"),
        (("--prompt", ""), "prompt is empty"),
        (("--prompt", "def add(", "--suffix", "return a"), "suffix: the model has no special tokens"),
        (("--prompt", "x", "--temperature", "-1"), "temperature must be between 0 and 100, got -1.0"),
        (("--prompt", "x", "--min-p", "1.5"), "min_p must be between 0 and 1, got 1.5"),
        (("--prompt", "x", "--logit-bias", "seven=1"), "--logit-bias must be ID=NUMBER, got 'seven=1'"),
        (("--prompt", "x", "--regex", "("), "regex: "),
        (("--prompt", "x", "--json-schema", "missing.json"), "missing.json"),
        (("--file", "missing.txt"), "missing.txt"),
        (("--prompt", "x", "--file", "missing.txt"), "either --prompt or --file"),
        (("--prompt", "clips " * 2000), "1024"),
    ],
    ids=[
        *("unknown model", "empty prompt", "no middles", "temperature", "min-p", "bias", "pattern", "no schema"),
        *("no file", "two prompts", "too long"),
    ],
)
def test_generate_refuses_in_one_line(omnidraft: Run, arguments: tuple[str, ...], words: str) -> None:
    assert_refused(omnidraft("generate", *arguments), words)


def test_what_cannot_be_reached_or_found_is_refused_in_one_line(omnidraft: Run, tmp_path: Path) -> None:
    broker = {"OMNIDRAFT_LOG": "kafka://127.0.0.1:1", "OMNIDRAFT_LOG__REQUEST_TIMEOUT_S": "2"}
    assert_refused(omnidraft("traces", "tail", **broker), "127.0.0.1:1")
    registry = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1"}
    assert_refused(omnidraft("snapshots", "list", **registry), "http://127.0.0.1:1")
    assert_refused(omnidraft("snapshots", "show", "99"), "there is no registry at directory:///")
    (tmp_path / "registry").mkdir()
    assert_refused(omnidraft("snapshots", "show", "99"), "there is no version 99; there are no versions yet")
    assert_refused(omnidraft("snapshots", "list", "--config", tmp_path / "missing.toml"), "missing.toml")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[decode]\nwidht = 6\n")
    assert_refused(omnidraft("snapshots", "list", "--config", wrong), "decode.widht")


def test_a_folder_learned_offline_becomes_the_newest_version(
    omnidraft: Run, tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    target, drafter = map(str, tiny_models)
    for number in (1, 2):
        folder = make_bundle(tmp_path, f"s{number}", target=target, drafter=drafter)
        done = omnidraft("snapshots", "publish", folder)
        assert f"published as version {number}" in done.stdout, done.stderr
    listed = json.loads(omnidraft("snapshots", "list", "--json").stdout)
    assert [row["aliases"] for row in listed] == [[], ["challenger"]]
    assert_refused(omnidraft("snapshots", "publish", tmp_path), "manifest.json")


def test_a_cache_of_another_pair_is_refused(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    pair = tiny_settings(tiny_models)
    other = tiny_settings((tiny_models[1], tiny_models[0]))
    words = assembly.vocabularies(pair)
    arrays = warmed(assembly.ngram_cache(pair, words, None), words.alignment).to_arrays()
    with pytest.raises(VocabularyError):
        assembly.ngram_cache(other, assembly.vocabularies(other), arrays)
