"""The long experiments on tiny real models: the paper's tables and drift, their resuming, and what they refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnidraft.errors import ConfigError, RequestError
from pipelines import drift
from pipelines.bench.methods import HUGGINGFACE
from pipelines.paper_table import __main__, decoding, sweeps
from pipelines.paper_table.methods import METHODS
from pipelines.paper_table.result_cache import ResultCache
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
    for task, text in TEXTS.items():
        rows = [{"prompt": text.format(n=n), "split": "test" if n < 3 else "train"} for n in range(11)]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def table_arguments(data: Path, tmp_path: Path, models: tuple[Path, Path]) -> list[object]:
    target, drafter = models
    sizes = ("--num-train", 8, "--num-test", 2, "--num-decoded", 2, "--max-new-tokens", 12)
    places = ("--work", tmp_path / "work", "--out", tmp_path / "results", "--json", tmp_path / "table.json")
    return ["--targets", target, "--drafter", drafter, "--data", data, "--tasks", "numbers,clips", *sizes, *places]


def kinds_drafted(answers: list[dict[str, Any]], method: str) -> set[str]:
    return {source for each in answers for source in each[method]["drafted_by_source"]}


def test_the_papers_tables_come_out_whole_and_exact(
    data: Path, tmp_path: Path, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "LORA_RANKS", (2, 4))
    monkeypatch.setattr(sweeps, "LAMBDAS", (0.2,))
    run(__main__.main, *table_arguments(data, tmp_path, tiny_models), "--num-slow", 1)
    cells = json.loads((tmp_path / "table.json").read_text())["cells"]
    for task in TEXTS:
        answers = [cells[f"table/{tiny_models[0]}/{task}/{number}"] for number in range(2)]
        assert set(answers[0]) == {*__main__.DEFAULT}
        assert set(answers[1]) == {*__main__.DEFAULT} - {*HUGGINGFACE}
        for each in answers:
            assert all(each[name]["ids"] == each["plain"]["ids"] for name in ("plain", *METHODS) if name != "alm")
            assert all("failure" not in each[name] for name in {*each} - {*HUGGINGFACE})  # theirs crash now and then
        assert kinds_drafted(answers, "spd-dm") == kinds_drafted(answers, "dm") == {"direct"}
        assert kinds_drafted(answers, "plain") == set()
        for name in ("ngram-pp", "dm+ngram", "dm+ngram-lora"):
            assert kinds_drafted(answers, name) <= {"direct", "merge"}
    sweep = f"sweep/{tiny_models[0]}/{next(iter(TEXTS))}//"
    cells |= {name.removeprefix(sweep): cell for name, cell in cells.items() if name.startswith(sweep)}
    assert set(cells["adaptive/0"]) == {"plain", *sweeps.ADAPTIVE}
    assert set(cells["warm-cache/1"]) > {"plain", "off", "warm, quarter, LRU", "all, warm start"}
    assert kinds_drafted([cells["warm-cache/0"]], "off") == {"direct"}
    assert set(cells["temperature/1/0"]) == {"plain", "spd-dm", "dm+ngram", "ours"}
    assert {"lora/full", "lora/2", "lora/4", "loss/nll", "loss/dm_paper + 0.2 ngram"} < set(cells)
    caches = cells["cache"]
    for swept in (cells["lora/2"], cells["loss/nll"], caches["all"]):
        assert {"agreement", "gain", "gain_error"} < set(swept)
        assert swept["tokens_per_pass"]["1"] >= 1.0
    for name, reference in (("lora/2", "lora/full"), ("loss/dm + 0.2 ngram", "loss/dm")):
        assert cells[name]["paired_gain"] == pytest.approx(cells[name]["agreement"] - cells[reference]["agreement"])
        assert cells[name]["paired_gain_error"] >= 0
        assert "paired_gain" not in cells[reference]
    assert all(row["bytes_per_entry"] <= 24 for row in caches.values())
    assert caches["quarter, LRU"]["entries"] <= caches["all"]["entries"]
    assert caches["all, warm start"]["hit_rate"] >= caches["one entry"]["hit_rate"]
    page = (tmp_path / "results" / "paper_table.md").read_text()
    headings = ("Methods", "LoRA rank", "Losses", "The n-gram cache", "Warm caches", "Adaptive", "Temperature 0.01")
    assert all(f"## {heading}" in page for heading in headings)
    assert (tmp_path / "results" / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_table_goes_on_with_the_missing_prompts(
    data: Path, tmp_path: Path, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*table_arguments(data, tmp_path, tiny_models), "--sweeps", "", "--methods", "plain,spd-dm"]
    computed = decoding._answers
    asked_for: list[int] = []

    def dies_at_second(load: Any, prompt: Any, number: int, skipped: Any) -> Any:
        asked_for.append(number)
        if len(asked_for) == 2:
            raise MemoryError
        return computed(load, prompt, number, skipped)

    monkeypatch.setattr(decoding, "_answers", dies_at_second)
    with pytest.raises(MemoryError):
        run(__main__.main, *arguments)
    first = json.loads((tmp_path / "table.json").read_text())["cells"]
    run(__main__.main, *arguments)
    cells = json.loads((tmp_path / "table.json").read_text())["cells"]
    assert asked_for == [0, 1, 1, 0, 1]
    assert sum(name.startswith("table/") for name in cells) == 4
    assert cells.items() > first.items()


def test_cells_of_other_options_are_never_mixed(tmp_path: Path) -> None:
    ResultCache(tmp_path / "a.json", {"n": 1}).get("x", lambda: 1)
    assert ResultCache(tmp_path / "a.json", {"n": 1}).get("x", lambda: 2) == 1
    with pytest.raises(ConfigError, match="other options"):
        ResultCache(tmp_path / "a.json", {"n": 2})
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(ConfigError, match="no file of this experiment"):
        ResultCache(tmp_path / "b.json", {})


def test_cells_of_other_rows_or_settings_are_never_mixed(tmp_path: Path) -> None:
    cells = ResultCache(tmp_path / "a.json", {})
    cells.require("rows of gsm8k", "1f")
    cells.get("x", lambda: 1)
    again = ResultCache(tmp_path / "a.json", {})
    again.require("rows of gsm8k", "1f")
    again.require("rows of code", "2e")
    with pytest.raises(ConfigError, match="was made with another rows of gsm8k"):
        again.require("rows of gsm8k", "3d")
    assert len(again.content["made_by"]) == 1


def test_a_snapshot_that_learned_other_rows_is_not_taken(
    data: Path, tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    arguments = [*table_arguments(data, tmp_path, tiny_models), "--sweeps", "", "--methods", "plain,ngram-pp"]
    run(__main__.main, *arguments)
    agreement = json.loads((tmp_path / "table.json").read_text())["cells"][f"offline/{tiny_models[0]}/numbers"]
    assert set(agreement) == {"untrained", "ngram-pp"}
    assert agreement["ngram-pp"]["gain_error"] >= 0
    assert agreement["untrained"]["gain_error"] is None
    rows = [json.loads(line) for line in (data / "numbers.jsonl").read_text().splitlines()]
    (data / "numbers.jsonl").write_text("\n".join(json.dumps(row | {"prompt": row["prompt"] + "!"}) for row in rows))
    (tmp_path / "table.json").unlink()
    with pytest.raises(ConfigError, match="learned other rows of numbers"):
        run(__main__.main, *arguments)


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
        (__main__.main, ("--methods", "plain,magic"), "magic"),
        (__main__.main, ("--sweeps", "all"), "no sweep"),
        (__main__.main, ("--dm", "magic"), "magic"),
        (__main__.main, ("--tasks", "nothing"), "nothing.jsonl"),
        (__main__.main, ("--tasks", "numbers", "--num-train", "9"), "numbers.jsonl has 8 rows of split train"),
        (__main__.main, ("--num-test", "4"), "--num-decoded 6 is more than --num-test 4"),
        (drift.main, ("--tasks", "numbers"), "nothing drifts"),
        (drift.main, ("--tasks", "clips,clips", "--num-answers", "6"), "has 2 rows of split train after the first 6"),
    ],
)
def test_what_an_experiment_cannot_do_is_said_before_it_starts(
    data: Path, tmp_path: Path, command: Callable[..., None], arguments: tuple[str, ...], words: str
) -> None:
    places = ("--data", data, "--work", tmp_path / "work", "--out", tmp_path / "results")
    with pytest.raises((RequestError, ConfigError), match=words):
        run(command, *places, *arguments)
