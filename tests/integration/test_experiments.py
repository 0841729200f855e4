"""The long experiments on tiny real models: the paper's tables and drift, their resuming, and what they refuse."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnidraft.errors import ConfigError, RequestError
from pipelines import drift, paper_table
from tests.cli_runs import Environ
from tests.cli_runs import run_pipeline as run

pytestmark = pytest.mark.long

TEXTS = {"numbers": "How many are {n} and {n}?", "clips": "Natalia sold {n} clips in May. How many in April?"}


@pytest.fixture(autouse=True)
def environ(pipeline_environ: Environ, tmp_path: Path) -> None:
    pipeline_environ(
        {
            "OMNIDRAFT_LEARNER__LEARNING_RATE": "3e-3",
            "MLFLOW_TRACKING_URI": f"directory:///{tmp_path}/registry",
        }
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for task in TEXTS:
        write_prompts(folder, task, 11)
    return folder


def write_prompts(folder: Path, task: str, num: int) -> None:
    """Three prompts are of the split `test`."""
    rows = [{"prompt": TEXTS[task].format(n=n), "split": "test" if n < 3 else "train"} for n in range(num)]
    (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table_arguments(data: Path, tmp_path: Path, models: tuple[Path, Path]) -> list[object]:
    target, drafter = models
    sizes = ("--num-train", 8, "--num-test", 2, "--max-new-tokens", 12)
    named = ("--targets", target, "--drafter", drafter, "--data", data, "--tasks", "numbers")
    return [*named, *sizes, "--out", tmp_path / "results"]


def test_a_papers_table_is_learned_decoded_and_goes_on_where_it_was_interrupted(
    data: Path, tmp_path: Path, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_prompts(data, "numbers", 27)  # enough to hold out several requests, without which an error is not known
    arguments = [*table_arguments(data, tmp_path, tiny_models), "--num-train", 24, "--tables", "methods,loss"]
    arguments += ["--rows", "spd-dm,dm,nll,dm_paper,ours"]
    ran: list[str] = []
    started = subprocess.run

    def dies_at_the_bench(command: list[str], **options: Any) -> Any:
        ran.append(" ".join(command[2:4]) if command[2] == "omnidraft.cli" else command[2])
        if len(ran) == 4:
            raise MemoryError
        return started(command, **options)

    monkeypatch.setattr(subprocess, "run", dies_at_the_bench)
    with pytest.raises(MemoryError):
        run(paper_table.main, *arguments)
    run(paper_table.main, *arguments)
    assert ran.count("pipelines.record") == 1
    assert ran.count("omnidraft.cli replay") == 5
    assert ran.count("pipelines.bench") == 4, "one of them died"
    methods, losses = json.loads((tmp_path / "results" / "paper_table.json").read_text()).values()
    assert list(methods) == ["spd-dm", "dm", "ours"]
    assert all(row["same_texts"] == row["num_texts"] == 2 for row in methods.values())
    assert list(losses) == ["dm_paper", "dm", "nll"]
    assert all(row["held_out"] >= 0 and row["gain_error"] >= 0 for row in losses.values())
    with pytest.raises(ConfigError, match="was made with other options"):
        run(paper_table.main, *arguments, "--max-new-tokens", 13)


def drift_arguments(data: Path, tmp_path: Path, models: tuple[Path, Path]) -> list[object]:
    target, drafter = models
    places = ("--work", tmp_path / "work", "--out", tmp_path / "results", "--json", tmp_path / "drift.json")
    sizes = ("--num-answers", 8, "--num-test", 3, "--max-new-tokens", 12)
    return ["--targets", target, "--drafter", drafter, "--data", data, "--tasks", "numbers,clips", *sizes, *places]


def test_drift_follows_traffic_from_task_to_task(
    data: Path, tmp_path: Path, tiny_models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary is printed before anything can go wrong with the plot."""
    run(drift.main, *drift_arguments(data, tmp_path, tiny_models))
    assert capsys.readouterr().out.rstrip().endswith(".png")
    made = json.loads((tmp_path / "drift.json").read_text())
    assert set(made["arms"]) == set(drift.ARMS)
    for points in made["arms"].values():
        assert [point["phase"].split(",")[0] for point in points] == ["1. numbers"] * 2 + ["2. clips"] * 2
        tokens = [point["num_tokens"] for point in points]
        assert tokens == sorted(tokens)
    first = {arm: points[0]["agreement"] for arm, points in made["arms"].items()}
    assert len(set(first.values())) == 1
    kept = made["kept"]
    assert all(len(each) == 2 for each in kept.values())
    assert kept[drift.FROZEN][0] == kept[drift.FROZEN][1] == kept[drift.ARMS[0]][0]
    assert list((tmp_path / "results").glob("drift-*.png"))


def test_drift_learns_nothing_when_its_plot_would_have_no_folder(
    data: Path, tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    (tmp_path / "results").touch()
    with pytest.raises(FileExistsError):
        run(drift.main, *drift_arguments(data, tmp_path, tiny_models))
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (paper_table.main, ("--rows", "magic"), "magic"),
        (paper_table.main, ("--tables", "all"), "no table"),
        (paper_table.main, ("--tasks", "nothing"), "nothing.jsonl"),
        (paper_table.main, ("--tasks", "numbers", "--num-train", "9"), "numbers.jsonl has 8 rows of split train"),
        (drift.main, ("--tasks", "numbers"), "nothing drifts"),
        (drift.main, ("--tasks", "clips,clips", "--num-answers", "6"), "has 2 rows of split train after the first 6"),
    ],
)
def test_what_an_experiment_cannot_do_is_said_before_it_starts(
    data: Path, tmp_path: Path, command: Callable[..., None], arguments: tuple[str, ...], words: str
) -> None:
    places = ("--data", data, "--out", tmp_path / "results")
    with pytest.raises((RequestError, ConfigError), match=words):
        run(command, *places, *arguments)
