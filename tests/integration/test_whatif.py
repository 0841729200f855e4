"""`omnidraft whatif` counts of recorded answers what live decoding counts, on tiny real models."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omnidraft import assembly, config, throttle
from omnidraft.decode.generation import GenerationRequest
from omnidraft.params import Sampling
from omnidraft.ports import Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.whatif import log_slice, round_costs
from omnidraft.whatif.known_costs import KnownCosts, read_costs
from tests.cli_runs import Environ, Run, run_cli

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
    chosen |= {"OMNIDRAFT_LOG": f"sqlite:///{tmp_path}/log.db", "OMNIDRAFT_LEARNER__LEARNING_RATE": "3e-3"}
    pipeline_environ(chosen)
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr(throttle, "give_way", lambda: None)  # in a process of its own; here all tests would give way
    return lambda *arguments: run_cli(arguments, monkeypatch, capsys)


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
    for record in log_slice.read(None, settings, log_slice.SliceFilter()).records:
        counts[record.request_id] += len(record.rounds.num_nodes_R)
    return counts


@pytest.mark.parametrize(("num_draft_tokens", "memory"), [(5, "off"), (3, "on")])
def test_the_passes_of_recorded_answers_are_those_of_live_decoding(
    num_draft_tokens: int, memory: str, tmp_path: Path, run: Run
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
    out, drawn = tmp_path / "whatif.json", tmp_path / "a.svg"
    arguments = ("--draft-tokens", num_draft_tokens, "--memory", memory, "--costs", tmp_path / "costs.json")
    done = run("whatif", *arguments, "--json", out, "--picture", drawn)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    plain, counts = report["counts"].values()
    live_passes = [counted[f"live-{number}"] for number in range(len(PROMPTS))]
    assert live_passes != [counted[f"log-{number}"] for number in range(len(PROMPTS))]
    assert all(num_tokens == num_passes for num_tokens, num_passes, _ in plain)
    replayed = dict(zip(report["answers"], counts, strict=True))
    found = [replayed[f"log-{number}"] for number in range(len(PROMPTS))]
    assert [passes for _, passes, _ in found] == live_passes
    assert [predicted for *_, predicted in found] == pytest.approx(seconds[len(PROMPTS) :])
    for shown in (done.stdout, drawn.read_text()):
        assert all(each in shown for each in ("plain decoding (none, memory off)", "16 answers", "one of a test"))


def test_each_drafter_is_loaded_once_and_no_choice_learns_from_another(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """In whatever order they are drafted for, and an interrupted run goes on. That the snapshot may have learned these
    answers stands below the table and in the picture."""
    with serving(0, memory=False) as worker:
        for number, prompt in enumerate(PROMPTS):
            request = GenerationRequest(prompt=prompt, max_new_tokens=40, seed=number)
            assert list(worker.served[0].engine.stream(request).steps)
    assert run("replay", "--snapshots", tmp_path / "made", "--num-passes", 20).returncode == 0
    drafters, drawn, reports = ["base", str(tmp_path / "made" / "as-set")], tmp_path / "a.svg", list[Any]()
    for orders, num_loaded in ((1, 1), (-1, 1), (-1, 0)):
        caplog.clear()
        names, lengths, memories = (",".join(each[::orders]) for each in (drafters, ["3", "5"], ["on", "off"]))
        arguments = ("--costs", tmp_path / "costs.json", "--json", tmp_path / f"{orders}.json", "--picture", drawn)
        done = run("whatif", "--drafter", names, "--draft-tokens", lengths, "--memory", memories, *arguments)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads((tmp_path / f"{orders}.json").read_text()))
        for begun in ("loading drafter base", f"loading drafter {drafters[1]}", "loading snapshot"):
            assert sum(each.startswith(begun) for each in caplog.messages) == num_loaded
        assert all("cannot tell what it learned of these 8 records" in each for each in (done.stdout, done.stderr))
        assert "cannot tell what it learned" in " ".join(re.findall("<!-- (.*?) -->", drawn.read_text()))  # by lines
    assert len(reports[0]["counts"]) == 9
    assert reports[0]["counts"] == reports[1]["counts"]
    assert reports[1] == reports[2]


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("whatif", (), "there is no log at sqlite:///"),
        ("whatif", ("--since", "yesterday"), "not a time: 'yesterday'"),
        ("whatif", ("--log", "nowhere.avro"), "there is no archive at nowhere.avro"),
        ("whatif", ("--drafter", "champion", "--log", "sqlite:///{0}/junk.db"), "there is no registry"),
        ("whatif", ("--log", "sqlite:///{0}/junk.db"), "the slice has no records; passed over: 1 unreadable"),
        ("whatif", ("--log", "sqlite:///{0}/empty.db"), "empty.db is no log, or a damaged one"),
        ("whatif", ("--picture", "{0}/new/a.png"), "there is no folder"),
        ("whatif", ("--picture", "{0}/a.docx"), "pictures end with"),
        ("whatif", ("--json", "{0}/new/a.json"), "there is no folder"),
        ("whatif", ("--json", "{0}/junk.db"), "junk.db is no report of `omnidraft whatif`"),
        ("whatif", ("--json", "{0}/costs.json"), "costs.json is no report of `omnidraft whatif`"),
        ("whatif", ("--json", "{0}/list.json"), "list.json is no report of `omnidraft whatif`"),
        ("whatif", ("--costs", "{0}/list.json"), "list.json is no file of `omnidraft costs export`"),
        ("whatif", ("--costs", "{0}/negative.json"), "negative.json is no file of `omnidraft costs export`"),
        ("whatif", ("--costs", "{0}"), "cannot be read: Is a directory"),
        ("costs export", ("--out", "{0}/new/a.json"), "there is no folder"),
        ("replay", (), "there is no log at sqlite:///"),
        ("replay", ("--log", "nowhere.avro"), "there is no archive at nowhere.avro"),
        ("replay", ("--picture", "{0}/a.docx"), "pictures end with"),
        ("replay", ("--filter", "colour=red"), "name=value"),
        ("replay", ("--since", "yesterday"), "not a time"),
        ("replay", ("--vary", "learner.loss"), "SETTING=VALUE"),
        ("replay", ("--vary", "loss=nll"), "SETTING=VALUE"),
        ("replay", ("--vary", "learner.colour=red"), "no such setting"),
        ("replay", ("--vary", "learner.loss=magic"), "magic"),
        ("replay", ("--vary", "models.drafter=no-such-drafter", "--log", "sqlite:///{0}/junk.db"), "no-such-drafter"),
        ("verify --from-log", (), "at sqlite:///"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured_or_made(
    command: str, arguments: tuple[str, ...], words: str, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "empty.db").touch()
    costs = {"about": {}, "passes": {"1": -1.0}, "others": {"1": 0.0}, "steps": {"base": {"1": 0.1}}}
    (tmp_path / "negative.json").write_text(json.dumps(costs))
    settings = config.load(None, log={"url": f"sqlite:///{tmp_path}/junk.db"})
    with closing(assembly.log_writer(settings, settings.log.traces_topic)) as writer:
        writer.append([Outgoing(b"k", b"junk")])
    done = run(*command.split(), *(each.format(tmp_path) for each in arguments))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert words in done.stderr
    assert not {"log.db", "registry", "new", "runs"} & {each.name for each in tmp_path.iterdir()}


def test_costs_are_measured_once_for_each_kind_of_drafter_and_name_their_pair(tmp_path: Path, run: Run) -> None:
    settings, out = config.load(), tmp_path / "measured.json"
    base = round_costs.this_machine(settings, has_learned=False)
    both = round_costs.this_machine(settings, has_learned=True)
    assert (*base.steps, *both.steps) == ("base", "base", "learned")
    assert (both.passes, both.steps["base"]) == (base.passes, base.steps["base"])
    assert base.about["drafter"].endswith("drafter in float32")
    moved = replace(base, about=base.about | {"drafter": "/all in one/drafter in float32"})
    assert base.is_of(settings.models)
    assert moved.is_of(settings.models)
    for seconds in (base.passes, base.steps["base"], base.others):
        assert 0 < seconds[1] <= seconds[max(seconds)] < 10
    done = run("costs", "export", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "measuring rounds of the base drafter" in done.stderr
    with serving(0, memory=False) as worker:
        assert list(worker.served[0].engine.stream(GenerationRequest(prompt="Go", max_new_tokens=9)).steps)
    for costs, is_another in ((out, False), (tmp_path / "costs.json", True)):
        done = run("whatif", "--costs", costs)
        assert done.returncode == 0, done.stderr
        for shown in (done.stderr, done.stdout):
            assert ("costs of another pair, tiny in float32 drafted by ? on one of a test" in shown) == is_another
