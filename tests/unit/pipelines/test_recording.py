"""Records made offline: which rows, and under which settings what was recorded is taken again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnidraft import config
from omnidraft.errors import RequestError
from omnidraft.prompts import Prompt
from pipelines.drift import phases_of
from pipelines.lib.recording import Recording, RecordingLimits, rows_of_split

PartName = Callable[..., str]


def written(folder: Path, splits: list[str | None]) -> Path:
    rows = [{"prompt": f"question {n}"} | ({"split": each} if each else {}) for n, each in enumerate(splits)]
    path = folder / "task.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_rows_that_do_not_say_whether_they_are_learned_are_refused(tmp_path: Path) -> None:
    """Else the same rows would be learned and judge."""
    assert len(rows_of_split(written(tmp_path, ["train", "test", "train"]), 2, "train")) == 2
    with pytest.raises(RequestError, match=r"task\.jsonl has rows without `split`"):
        rows_of_split(written(tmp_path, ["train", None]), 1, "test")


def test_a_file_with_fewer_rows_than_are_asked_for_is_refused(tmp_path: Path) -> None:
    """Else the figures would be those of a smaller experiment than their options say."""
    path = written(tmp_path, ["train", "test", "train"])
    with pytest.raises(RequestError, match=r"task\.jsonl has 2 rows of split train after the first 0, fewer than 3"):
        rows_of_split(path, 3, "train")
    with pytest.raises(RequestError, match="has 1 rows of split train after the first 1, fewer than 2"):
        rows_of_split(path, 2, "train", skip=1)


def test_no_phase_of_a_drift_asks_what_an_earlier_one_asked() -> None:
    phases = phases_of(["a", "b"], ["gsm8k", "code"], num_answers=5)
    assert [(each.number, each.target, each.task, each.skip) for each in phases] == [
        (1, "a", "gsm8k", 0),
        (2, "a", "code", 0),
        (3, "b", "gsm8k", 5),
        (4, "b", "code", 5),
    ]
    assert len({str(each) for each in phases}) == 4
    assert [(each.task, each.skip) for each in phases_of(["a"], ["x", " y", "x"], 5)] == [("x", 0), ("y", 0), ("x", 5)]


@pytest.fixture
def part_name(tiny_models: tuple[Path, Path], omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch) -> PartName:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    pair = {"target": str(tiny_models[0]), "drafter": str(tiny_models[1])}

    def name_of(more: dict[str, Any], *, is_given: bool) -> str:
        settings = config.load(None, **(more | {"models": pair | more.get("models", {})}))
        return Recording(settings, Path(), RecordingLimits(8, "team"), is_given=is_given)._name(0, Prompt("question"))

    return name_of


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(
    "changed", [{"recorder": {"top_k": 3}}, {"models": {"engine": "llamacpp"}}, {"decode": {"mode": "reproducible"}}]
)
def test_answers_that_were_recorded_under_other_settings_are_not_taken(
    changed: dict[str, Any], is_given: bool, part_name: PartName
) -> None:
    assert part_name({}, is_given=is_given) != part_name(changed, is_given=is_given)


@pytest.mark.parametrize("changed", [{"decode": {"num_draft_tokens": 3}}, {"cache": {"mode": "off"}}])
def test_the_way_of_drafting_tells_answers_of_the_target_apart_and_no_given_ones(
    changed: dict[str, Any], part_name: PartName
) -> None:
    assert part_name({}, is_given=False) != part_name(changed, is_given=False)
    assert part_name({}, is_given=True) == part_name(changed, is_given=True)


def test_rows_that_learn_otherwise_share_what_was_recorded(part_name: PartName) -> None:
    learns = {"learner": {"train": "lora", "loss": "nll"}}
    assert part_name({}, is_given=False) == part_name(learns, is_given=False)
