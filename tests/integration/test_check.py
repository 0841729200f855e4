"""What `omnidraft check` promises: honest pairs pass, a planted bug is shown and exit code 1, bad input is one line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from omnidraft.decode.sampling.noise import SeededNoise
from tests.cli_runs import run_cli, tiny_pair_environ

ROOT = Path(__file__).parents[2]
KEYS = {"texts", "identical", "explained", "unexplained", "law", "runs", "passed", "target", "drafter", "snapshot"}
LAW_KEYS = {"position", "samples", "tv", "tv_limit", "passed", "odds"}

Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environ(omnidraft_home: Path, tiny_models: tuple[Path, Path]) -> dict[str, str]:
    return {
        **tiny_pair_environ(omnidraft_home, tiny_models),
        "OMNIDRAFT_DECODE__POLICY": "fixed",  # `cost` may draft nothing on so small a pair
        "COLUMNS": "150",
    }


@pytest.fixture
def check(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run `omnidraft check` in this process."""
    return lambda *arguments: run_cli(("check", *arguments), monkeypatch, capsys, environ)


SHORT = ("--num-prompts", 2, "--max-new-tokens", 8, "--law-samples", 100)


def test_an_honest_pair_passes_at_every_temperature_in_both_modes(check: Check, tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    done = check("--temperature", "0,0.7,1", *SHORT, "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EXACT: 12 of 12 texts are identical" in done.stdout
    found = json.loads(out.read_text())
    assert found.keys() >= KEYS
    assert found["law"].keys() >= LAW_KEYS
    assert (found["texts"], found["identical"], found["unexplained"], found["passed"]) == (12, 12, 0, True)
    assert [(run["mode"], run["temperature"]) for run in found["runs"]] == [
        (mode, temperature) for mode in ("reproducible", "fast") for temperature in (0, 0.7, 1)
    ]
    for run in found["runs"]:
        assert run["law"]["passed"]
        assert run["scored"] > 0
        assert run["law"]["samples"] == 100
        assert (run["rounding"] is None) == (run["mode"] == "reproducible")
        assert [law["position"] for law in run["law_positions"]] == [1, 2]


class Biased(SeededNoise):
    """Planted: positions that the proposer looked at are drawn with other noise."""

    def exponentials(self, position, ids):
        self._uniforms.setdefault(position, self._uniforms_at(position)[::-1].copy())
        return super().exponentials(position, ids)

    def draw(self, ids_M, p_M, position):
        return super().draw(ids_M, p_M, position + 1000 * (position in self._uniforms))


@pytest.mark.parametrize("mode", ["reproducible", "fast"])
def test_a_planted_bug_is_found_and_shown(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    from omnidraft.decode import engine as engines

    made = engines.Engine.__init__

    def buggy(self, decoder, *args, **kwargs):
        decoder._noise = Biased
        made(self, decoder, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engines.Engine, "__init__", buggy)
        patch.setattr("omnidraft.assembly.drafting.NOISE_WEIGHTS", (1.0,))
        out = tmp_path / "check.json"
        done = check("--temperature", "1", "--mode", mode, *SHORT, "--json", out)
    assert done.returncode == 1, done.stdout
    assert "NOT EXACT" in done.stdout
    assert all(word in done.stdout for word in ("texts part at token", "before:", "plain:", "speculation:"))
    found = json.loads(out.read_text())
    assert found["unexplained"] > 0
    assert not found["passed"]
    wrong = [each for run in found["runs"] for each in run["differences"] if not each["is_explained"]]
    assert wrong
    assert all(each["problem"] and each["plain_token"] != each["drafted_token"] for each in wrong)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--temperature", "-1"), "temperature must be between 0 and 100, got -1"),
        (("--temperature", "0,hot"), "temperature must be numbers with commas between them, got '0,hot'"),
        (("--temperature", "nan"), "temperature must be between 0 and 100"),
        (("--mode", "wild"), "mode must be reproducible or fast"),
        (("--prompts", "missing.jsonl"), "missing.jsonl"),
        (("--json", "no/such/folder/out.json"), "no/such/folder"),
        (("--target", "no-such-model"), "no-such-model"),
        (("--snapshot", "no-such-snapshot"), "there is no registry"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"directory:///{tmp_path}/registry")
    done = check(*arguments)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("omnidraft: ")
    assert words in done.stderr


def test_a_report_that_cannot_be_written_is_printed_all_the_same(check: Check, tmp_path: Path) -> None:
    done = check("--temperature", "0", "--mode", "reproducible", *SHORT, "--json", path := tmp_path / ("x" * 300))
    assert done.returncode == 2, done.stderr
    told = f"omnidraft: cannot write {path}: File name too long; name another file, or make it writable"
    assert told in done.stderr.splitlines()
    assert "EXACT: 2 of 2 texts are identical" in done.stdout


def test_an_interrupted_process_ends_at_once_and_writes_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    """A million samples would take minutes; the interrupt comes when the models' vocabularies are aligned."""
    out, home = tmp_path / "out.json", tmp_path / "home"
    options = ("--mode", "reproducible", "--num-prompts", "1", "--law-samples", "1000000", "--json", str(out))
    running = subprocess.Popen(
        [sys.executable, "-m", "omnidraft.cli", "check", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environ | {"PYTHONPATH": str(ROOT), "OMNIDRAFT_HOME": str(home)},
    )
    while not (home / "alignments").is_dir() and running.poll() is None:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    try:
        shown, said = running.communicate(timeout=20)
    except subprocess.TimeoutExpired:  # it came inside a callback of a library, where Python drops it: people try again
        running.send_signal(signal.SIGINT)
        shown, said = running.communicate(timeout=20)
    assert (running.returncode, shown) == (130, "")
    assert "Traceback" not in said
    assert not out.exists()
