"""`omnidraft whatif` counts of recorded answers what live decoding counts, on tiny real models."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from omnidraft import assembly, config, throttle
from omnidraft.decode.generation import GenerationRequest
from omnidraft.params import Sampling
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.whatif import log_slice
from omnidraft.whatif.known_costs import KnownCosts, read_costs
from tests.cli_runs import Environ, run_cli

COSTS = {
    "about": {"target": "tiny", "weights": "tiny in float32", "processor": "one of a test"},
    "passes": {"1": 0.05, "8": 0.06, "32": 0.1},
    "steps": {"base": {"1": 0.005, "4": 0.006, "64": 0.03}},
    "others": {"1": 0.001, "8": 0.004},
}
PROMPTS = ["How many clips?", "The river goes into the sea", "def add(first, second):", "How many clips?"] * 2


@pytest.fixture(autouse=True)
def environ(pipeline_environ: Environ, tmp_path: Path) -> None:
    chosen = {"OMNIDRAFT_DECODE__POLICY": "fixed", "MLFLOW_TRACKING_URI": f"directory:///{tmp_path}/registry"}
    pipeline_environ(chosen | {"OMNIDRAFT_LOG": f"sqlite:///{tmp_path}/log.db"})
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))


@contextmanager
def serving(num_draft_tokens: int, memory: bool) -> Iterator[assembly.Worker]:
    decode = {"num_draft_tokens": num_draft_tokens, "suffix_memory": memory}
    worker = assembly.worker(config.load(None, decode=decode), CountingMetrics())
    try:
        yield worker
    finally:
        assert worker.producer is not None
        worker.producer.close(5.0)


def passes_by_answer() -> Counter[str]:
    settings, counts = config.load(), Counter[str]()
    for record in log_slice.read(settings.log.url, settings, log_slice.SliceFilter()).records:
        counts[record.request_id] += len(record.rounds.num_nodes_R)
    return counts


@pytest.mark.parametrize(("num_draft_tokens", "memory"), [(5, "off"), (3, "on")])
def test_the_passes_of_recorded_answers_are_those_of_live_decoding(
    num_draft_tokens: int,
    memory: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At any temperature, with penalties, with what the worker said before; recorded while nothing drafted. Seconds are
    those that the live rounds have by the same costs."""
    costs, seconds = KnownCosts(read_costs(tmp_path / "costs.json")), list[float]()
    for live in (False, True):
        with serving(num_draft_tokens if live else 0, memory == "on") as worker:
            for number, prompt in enumerate(PROMPTS):
                sampling = Sampling((0.0, 0.8)[number % 2], frequency_penalty=0.3 * (number % 3))
                name = f"{'live' if live else 'log'}-{number}"
                request = GenerationRequest(
                    prompt=prompt, max_new_tokens=40, seed=number, sampling=sampling, request_id=name
                )
                trees = [step.tree for step in worker.served[0].engine.stream(request).steps]
                seconds.append(sum(costs.round_s([tree]) for tree in trees))
                assert any(any(tree.step_rows) for tree in trees) == live
    counted = passes_by_answer()
    out = tmp_path / "whatif.json"
    arguments = ("--draft-tokens", num_draft_tokens, "--memory", memory, "--costs", tmp_path / "costs.json")
    monkeypatch.setattr(throttle, "give_way", lambda: None)  # in a process of its own; here all tests would give way
    done = run_cli(("whatif", *arguments, "--json", out, "--picture", tmp_path / "a.png"), monkeypatch, capsys)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    (counts,) = report["counts"].values()
    live_passes = [counted[f"live-{number}"] for number in range(len(PROMPTS))]
    assert live_passes != [counted[f"log-{number}"] for number in range(len(PROMPTS))]
    replayed = dict(zip(report["answers"], counts, strict=True))
    found = [replayed[f"log-{number}"] for number in range(len(PROMPTS))]
    assert [passes for _, passes, _ in found] == live_passes
    assert [predicted for *_, predicted in found] == pytest.approx(seconds[len(PROMPTS) :])
    assert (tmp_path / "a.png").stat().st_size


def test_costs_are_measured_while_the_pair_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "measured.json"
    done = run_cli(("costs", "export", "--out", out), monkeypatch, capsys)
    assert done.returncode == 0, done.stderr
    assert "measuring rounds of the base drafter" in done.stderr
    costs = read_costs(out)
    assert costs.about["drafter"].endswith("drafter in float32")
    for seconds in (costs.passes, costs.steps["base"], costs.others):
        assert 0 < seconds[1] <= seconds[max(seconds)] < 10
