"""What the command line promises: it works on a tiny pair, teaches in --help, and refuses in one line, exit code 2."""

import contextlib
import json
import logging
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from omnidraft import assembly, config
from omnidraft.errors import SnapshotCorrupt, VocabularyError
from omnidraft.ports import JUDGEMENT
from omnidraft.progress import stages
from omnidraft.registry.directory_registry import DirectoryRegistry
from tests.cli_runs import run_cli
from tests.snapshot_folders import make_bundle
from tests.tiny_engine import tiny_settings

ROOT = Path(__file__).parents[2]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def settings(tmp_path: Path, tiny_models: tuple[Path, Path]) -> Path:
    """A settings file for the tiny pair, a log and a registry below tmp_path."""
    path = tmp_path / "settings.toml"
    path.write_text(f"""
[models]
target = "{tiny_models[0]}"
drafter = "{tiny_models[1]}"
precision = "float32"
drafter_precision = "float32"
[decode]
threads = 1
prefill_rows = 16
mode = "reproducible"
[log]
url = "sqlite:///{tmp_path}/log.db"
[registry]
url = "directory:///{tmp_path}/registry"
""")
    return path


@pytest.fixture
def omnidraft(
    tmp_path: Path, omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run the command in this process, with more environment where a test gives it."""
    monkeypatch.chdir(tmp_path)
    for name, value in environment(omnidraft_home).items():
        monkeypatch.setenv(name, value)

    def run(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        return run_cli(arguments, monkeypatch, capsys, environ)

    return run


@pytest.fixture
def omnidraft_process(tmp_path: Path, omnidraft_home: Path) -> Run:
    """Run the command in a process of its own."""

    def run(*arguments: object, python: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *python, "-m", "omnidraft.cli", *map(str, arguments)]
        env = os.environ | environment(omnidraft_home) | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=100)

    return run


def environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "OMNIDRAFT_HOME": str(home), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def assert_refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("omnidraft: ")
    assert words in done.stderr


def test_generate_answers_and_says_what_drafting_gained(omnidraft: Run, omnidraft_process: Run, settings: Path) -> None:
    asked = ("generate", "--prompt", "How many clips?", "--seed", 7, "--temperature", 1, "--max-new-tokens", 12)
    drafted = omnidraft_process(*asked, "--config", settings)
    plain = omnidraft(*asked, "--config", settings, "--num-draft-tokens", 0, "--no-stream")
    assert (drafted.returncode, plain.returncode) == (0, 0), drafted.stderr + plain.stderr
    assert drafted.stdout == plain.stdout
    assert drafted.stdout.strip()
    assert "tokens/s" in drafted.stderr.splitlines()[-1]
    assert "agreement -" in plain.stderr.splitlines()[-1]


def test_a_terminal_is_told_every_stage_of_a_start_and_a_pipe_nothing_but_the_figures(
    omnidraft_process: Run, settings: Path, tiny_models: tuple[Path, Path], tmp_path: Path, omnidraft_home: Path
) -> None:
    asked = ("generate", "--config", str(settings), "--prompt", "How many clips?", "--max-new-tokens", "2")
    lines: list[str] = []
    command, ours, terminal = [sys.executable, "-m", "omnidraft.cli", *asked], *pty.openpty()
    env = os.environ | environment(omnidraft_home) | {"PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=terminal):
        os.close(terminal)
        with os.fdopen(ours) as screen, contextlib.suppress(OSError):  # a terminal that its last program closed
            for line in screen:
                if said := line.partition("omnidraft: ")[2].strip():  # else it is of a progress bar
                    lines.append(said)
                    print(f"{time.monotonic() - started:.1f} s", said)
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
    assert len(omnidraft_process(*asked).stderr.splitlines()) == 1


def test_a_stage_is_said_before_it_begins(
    omnidraft: Run,
    settings: Path,
    omnidraft_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When it is said, what it leaves behind is not there yet."""
    home, said = tmp_path / "home", {}
    shutil.copytree(omnidraft_home, home, ignore=shutil.ignore_patterns("alignments", "costs"))
    leaves = {"aligning": home / "alignments", "measuring": home / "costs"}

    def listen(record: logging.LogRecord) -> bool:
        name = record.getMessage().split()[0]
        said.setdefault(name, name in leaves and leaves[name].exists())
        return False

    monkeypatch.setattr(stages, "filters", [listen])
    caplog.set_level(logging.INFO, stages.name)
    asked = ("generate", "--config", settings, "--prompt", "How many clips?", "--max-new-tokens", 2)
    assert omnidraft(*asked, OMNIDRAFT_HOME=str(home)).returncode == 0
    assert all(folder.exists() for folder in leaves.values())
    assert said == {"reading": False, "aligning": False, "loading": False, "measuring": False}


def test_generate_is_kept_from_repeating_itself(omnidraft: Run, settings: Path) -> None:
    asked = ("generate", "--prompt", "How many clips?", "--no-stream", "--config", settings, "--max-new-tokens", 12)
    plain, biased = omnidraft(*asked), omnidraft(*asked, "--logit-bias", "40=100", "--num-draft-tokens", 3)
    penalised = omnidraft(*asked, "--repetition-penalty", 5, "--presence-penalty", 1, "--frequency-penalty", 2)
    assert len({plain.stdout, biased.stdout, penalised.stdout}) == 3
    assert len(set(biased.stdout.strip())) <= len(biased.stdout.strip()) / 12


def test_generate_keeps_to_a_pattern_and_to_a_schema(omnidraft: Run, settings: Path, tmp_path: Path) -> None:
    asked = ("generate", "--prompt", "How many clips?", "--no-stream", "--config", settings, "--max-new-tokens", 40)
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
        "unknown model",
        "empty prompt",
        "no middles",
        "temperature",
        "min-p",
        "bias",
        "pattern",
        "no schema",
        "no file",
        "two prompts",
        "too long",
    ],
)
def test_generate_refuses_in_one_line(omnidraft: Run, settings: Path, arguments: tuple[str, ...], words: str) -> None:
    assert_refused(omnidraft("generate", *arguments, "--config", settings), words)


def test_what_cannot_be_reached_or_found_is_refused_in_one_line(omnidraft: Run, settings: Path, tmp_path: Path) -> None:
    broker = {"OMNIDRAFT_LOG": "kafka://127.0.0.1:1", "OMNIDRAFT_LOG__REQUEST_TIMEOUT_S": "2"}
    assert_refused(omnidraft("traces", "tail", "--config", settings, **broker), "127.0.0.1:1")
    registry = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1"}
    assert_refused(omnidraft("snapshots", "list", "--config", settings, **registry), "http://127.0.0.1:1")
    assert_refused(omnidraft("snapshots", "show", "99", "--config", settings), "there is no registry at directory:///")
    (tmp_path / "registry").mkdir()
    assert_refused(omnidraft("snapshots", "show", "99", "--config", settings), "no snapshot is called '99'")
    assert_refused(omnidraft("snapshots", "list", "--config", tmp_path / "missing.toml"), "missing.toml")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[decode]\nwidht = 6\n")
    assert_refused(omnidraft("snapshots", "list", "--config", wrong), "decode.widht")


def test_snapshots_are_listed_shown_promoted_and_announced(
    omnidraft: Run, settings: Path, tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    registry = assembly.registry(config.load(settings, {}))
    target, drafter = map(str, tiny_models)
    registry.publish(make_bundle(tmp_path, "s1", target=target, drafter=drafter), None)
    assert "champion is version 1" in omnidraft("snapshots", "promote", "latest", "--config", settings).stdout
    listed = json.loads(omnidraft("snapshots", "list", "--json", "--config", settings).stdout)
    assert [(row["version"], row["aliases"]) for row in listed] == [(1, ["champion"])]
    loaded = config.load(settings, {})
    assert assembly.log_reader(loaded, loaded.log.control_topic).end_offsets() == {0: 1}
    assert_refused(omnidraft("snapshots", "rollback", "--config", settings), "previous")


def test_a_folder_learned_offline_becomes_the_newest_version(
    omnidraft: Run, settings: Path, tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    target, drafter = map(str, tiny_models)
    for number in (1, 2):
        folder = make_bundle(tmp_path, f"s{number}", target=target, drafter=drafter)
        done = omnidraft("snapshots", "publish", folder, "--config", settings)
        assert f"published as version {number}" in done.stdout, done.stderr
    refused = "refused: tenant [/x] \x1b[2J fell by more than the tolerance, " + 9 * "and so on "
    assembly.registry(config.load(settings, {})).annotate(1, {JUDGEMENT: refused})
    listed = json.loads(omnidraft("snapshots", "list", "--json", "--config", settings).stdout)
    assert [(row["aliases"], row["judgement"]) for row in listed] == [
        ([], refused),
        (["challenger"], None),
    ]
    lines = omnidraft("snapshots", "list", "--config", settings).stdout.splitlines()
    assert f"1: {refused.replace(chr(27), '?').rstrip()}" in [line.rstrip() for line in lines]
    assert_refused(omnidraft("snapshots", "publish", tmp_path, "--config", settings), "manifest.json")


def test_a_changed_snapshot_is_never_handed_out(tmp_path: Path) -> None:
    registry = DirectoryRegistry(tmp_path / "registry", "org/small", "big", keep_resume=2)
    registry.publish(make_bundle(tmp_path, "s1"), None)
    weights = next((tmp_path / "registry").glob("**/serving/drafter.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    registry.promote(1)
    with pytest.raises(SnapshotCorrupt, match=r"drafter\.safetensors"):
        registry.fetch(1, tmp_path / "staging")


def test_a_cache_of_another_pair_is_refused(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    pair = tiny_settings(tiny_models, cache={"warm": True})
    other = tiny_settings((tiny_models[1], tiny_models[0]))
    arrays = assembly.ngram_cache(pair, assembly.vocabularies(pair), None).to_arrays()
    with pytest.raises(VocabularyError):
        assembly.ngram_cache(other, assembly.vocabularies(other), arrays)


def test_help_does_without_the_heavy_imports(omnidraft_process: Run) -> None:
    """Each of them costs seconds."""
    done = omnidraft_process("--help", python=("-X", "importtime"))
    assert all(group in done.stdout for group in ("generate", "models", "traces", "snapshots", "learning", "run"))
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "transformers", "ray", "mlflow", "kafka", "fastapi", "numpy"}


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("generate", ["--prompt", "--target", "--min-p", "--logit-bias", "--seed", "--stop", "--config", "same seed"]),
        ("models pull", ["name", "--source"]),
        ("traces tail", ["--num", "--follow", "--config"]),
        ("snapshots promote", ["name", "--config", "champion"]),
        ("learning", ["pause", "resume", "restart"]),
        ("run worker", ["--config", "HTTP"]),
    ],
)
def test_help_of_a_command_names_its_options(command: str, options: list[str]) -> None:
    from typer.testing import CliRunner

    from omnidraft.cli import app

    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command.split(), "--help"])
    assert done.exit_code == 0
    assert all(option in done.stdout for option in options), done.stdout
