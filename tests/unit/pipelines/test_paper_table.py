"""The paper's table: what its rows draft with, and figures that follow from the answers, errors over questions."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omnidraft import config
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import RequestError
from omnidraft.prompts import Prompt
from pipelines.bench.runs import WARM_UP_TEXT, WARM_UP_TOKENS, BenchRun, Method
from pipelines.drift import phases_of
from pipelines.lib.learning import DEPTHS
from pipelines.lib.recording import Recording, RecordingLimits
from pipelines.paper_table import decoding, report
from pipelines.paper_table.figures import rows
from pipelines.paper_table.methods import CHAIN, METHODS, snapshot_folder
from pipelines.paper_table.parts import TablePlan, prompts_of

PartName = Callable[..., str]
PLAN = TablePlan(Path(), Path(), 2, 1, 8, None, num_chain_tokens=3, dm="dm_paper")


def answer(
    num_later_tokens: int,
    decode_s: float,
    drafted: dict[str, int] | None = None,
    accepted: dict[str, int] | None = None,
    first_token_s: float = 1.0,
) -> dict[str, Any]:
    return {
        "ids": list(range(num_later_tokens + 1)),
        "num_tokens": num_later_tokens + 1,
        "num_passes": 5,
        "num_later_tokens": num_later_tokens,
        "num_scored": 0,
        "num_agreed": 0,
        "first_token_s": first_token_s,
        "decode_s": decode_s,
        "accepted_by_source": accepted or {},
    } | ({} if drafted is None else {"drafted_by_source": drafted})


def test_a_figure_is_a_ratio_of_sums_with_its_error_over_the_questions() -> None:
    questions = [
        {"plain": answer(10, 10.0), "dm": answer(10, 5.0, {"direct": 6, "merge": 2}, {"direct": 4}, 3.0)},
        {"plain": answer(20, 20.0), "dm": answer(20, 5.0, {"direct": 8}, {"direct": 4}, 3.0)},
    ]
    row = rows(questions, ["plain", "dm"])["dm"]
    assert row["acceptance"] == pytest.approx(8 / 16)
    assert row["acceptance_error"] == pytest.approx(0.0)
    assert row["later_speedup"] == pytest.approx(30 / 10)
    assert row["later_speedup_error"] == pytest.approx((2 * (5**2 + 5**2)) ** 0.5 / 10)
    assert row["speedup"] == pytest.approx((11 + 21) / (8 + 8))
    assert (row["drafted_by_source"], row["same_texts"]) == ({"direct": 14, "merge": 2}, 2)
    assert (row["agreement"], row["own_speedup"]) == (None, None)
    assert rows(questions[:1], ["dm"])["dm"]["speedup_error"] is None


def test_an_answer_of_one_pass_counts_in_the_speed_up_of_whole_answers() -> None:
    one_pass = {"plain": answer(0, 0.0), "ours": answer(0, 0.0, first_token_s=2.0)}
    more = {"plain": answer(10, 10.0), "ours": answer(10, 4.0, first_token_s=2.0)}
    row = rows([one_pass, more], ["ours"])["ours"]
    assert row["speedup"] == pytest.approx((1 + 11) / (2 + 6))
    assert row["later_speedup"] == pytest.approx(10 / 4)


def test_a_failure_is_no_answer_and_another_engine_is_compared_with_its_own() -> None:
    questions = [
        {
            "plain": answer(10, 10.0, first_token_s=0.0),
            "hf-generate": answer(10, 40.0, first_token_s=0.0),
            "hf-uad": answer(10, 20.0, first_token_s=0.0),
        },
        {"plain": answer(10, 10.0), "hf-generate": answer(10, 40.0), "hf-uad": {"failure": "IndexError: no"}},
        {"plain": answer(10, 10.0)},
    ]
    row = rows(questions, ["hf-uad"])["hf-uad"]
    assert (row["speedup"], row["own_speedup"], row["acceptance"]) == (0.5, 2.0, None)
    assert (row["num_texts"], row["failures"]) == (1, ["IndexError: no"])


def test_the_papers_rows_draft_as_the_paper_does_and_ours_with_everything() -> None:
    settings = {name: method.settings("a-target", PLAN) for name, method in METHODS.items()}
    for name in ("spd-dm", "ngram-pp", "dm", "dm+ngram", "dm+ngram-lora"):
        decode = settings[name].decode
        assert {field: getattr(decode, field) for field in CHAIN} == dict(CHAIN)
        assert decode.num_draft_tokens == 3
        assert settings[name].cache.mode == ("off" if name in ("spd-dm", "dm") else "online")
    ours = settings["ours"].decode
    assert ours.splits
    assert ours.trees
    assert ours.suffix_memory
    assert ours.policy == "cost"
    assert settings["dm+ngram"].learner.loss == "dm_paper + 0.2 ngram"
    assert settings["dm+ngram-lora"].learner.train == "lora"


def test_the_page_shows_errors_hits_and_why_a_method_failed(tmp_path: Path) -> None:
    asked = {
        "plain": answer(10, 10.0, {}),
        "ngram-pp": answer(10, 5.0, {"direct": 6, "merge": 2}, {"merge": 1}, 0.5),
        "hf-tli": {"failure": "no bfloat16 here"},
    }
    backwards = dict(reversed(asked.items()))  # which way comes first changes from prompt to prompt
    cells = {"table/t/gsm8k/1": backwards, "table/t/gsm8k/0": asked}  # an interrupted run's order
    offline = {
        "untrained": {"agreement": 0.7, "gain": 0.0, "gain_error": None},
        "dm": {"agreement": 0.8, "gain": 0.1, "gain_error": 0.02},
    }
    made_by = [{"processor": "one", "commit": "abc"}, {"processor": "one", "commit": "def"}]
    content = {"options": {"plan": "small"}, "made_by": made_by, "cells": cells | {"offline/t/gsm8k": offline}}
    report.write(content, tmp_path)
    page = (tmp_path / report.PAGE).read_text()
    measured = "0.12 +- 0.00 | - | 2.20 +- 0.00 | 2.00x +- 0.00 | 2.00x +- 0.00 | -"
    assert f"| ngram-pp | {measured} | 4, 2 accepted | 12 direct, 4 merge |" in page
    assert page.index("| plain |") < page.index("| ngram-pp |") < page.index("| hf-tli |")
    assert "- hf-tli failed: no bfloat16 here" in page
    assert "| t/gsm8k | 0.700 | 0.800 (+0.100 +- 0.020) |" in page
    assert "commit abc" in page
    assert "commit def" in page
    assert (tmp_path / report.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_rows_of_a_sweep_are_compared_by_the_error_of_their_difference(tmp_path: Path) -> None:
    """They are judged on the same answers. Cells of an earlier run have no such gain."""
    chains = {"tokens_per_pass": {str(depth): 2.0 for depth in DEPTHS}}
    full = {"agreement": 0.8, "gain": 0.1, "gain_error": 0.02} | chains
    cells = {"sweep/t/gsm8k//lora/full": full, "sweep/t/gsm8k//loss/dm + 0.2 ngram": full}
    cells["sweep/t/gsm8k//lora/8"] = full | {"agreement": 0.79, "paired_gain": -0.01, "paired_gain_error": 0.003}
    report.write({"options": {}, "made_by": [], "cells": cells}, tmp_path)
    page = (tmp_path / report.PAGE).read_text()
    assert "| rank | agreement | over full weights | chain of 1 |" in page
    assert "| 8 | 0.790 (+0.100 +- 0.020) | -0.010 +- 0.003 | 2.00 |" in page
    assert "| full | 0.800 (+0.100 +- 0.020) | - | 2.00 |" in page
    assert "| dm + 0.2 ngram | 0.800 (+0.100 +- 0.020) | - | 2.00 |" in page


def written(folder: Path, splits: list[str | None]) -> TablePlan:
    rows_of = [{"prompt": f"question {n}"} | ({"split": each} if each else {}) for n, each in enumerate(splits)]
    (folder / "task.jsonl").write_text("\n".join(map(json.dumps, rows_of)))
    return replace(PLAN, data=folder)


def test_rows_that_do_not_say_whether_they_are_learned_are_refused(tmp_path: Path) -> None:
    """Else the same rows would be learned and judge."""
    assert len(prompts_of("task", "train", written(tmp_path, ["train", "test", "train"]))) == 2
    with pytest.raises(RequestError, match=r"task\.jsonl has rows without `split`"):
        prompts_of("task", "test", written(tmp_path, ["train", None]))


def test_a_file_with_fewer_rows_than_are_asked_for_is_refused(tmp_path: Path) -> None:
    """Else the figures would be those of a smaller experiment than their options say."""
    plan = written(tmp_path, ["train", "test", "train"])
    with pytest.raises(RequestError, match=r"task\.jsonl has 2 rows of split train after the first 0, fewer than 3"):
        prompts_of("task", "train", replace(plan, num_train=3))
    with pytest.raises(RequestError, match="has 1 rows of split train after the first 1, fewer than 2"):
        prompts_of("task", "train", plan, skip=1)


def test_a_snapshot_that_learned_records_of_other_settings_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = METHODS["dm"].settings("a-target", PLAN)
    folders = [snapshot_folder(settings, "gsm8k", PLAN, is_trained=True) for _ in range(2)]
    for name, value in (("RECORDER__TOP_K", "3"), ("DECODE__NUM_DRAFT_TOKENS", "2")):
        with monkeypatch.context() as patch:
            patch.setenv(f"OMNIDRAFT_{name}", value)
            folders.append(snapshot_folder(settings, "gsm8k", PLAN, is_trained=True))
    assert len(set(folders)) == 3


def transformers_methods(asked: list[tuple[str, int]]) -> dict[str, Method]:
    def generate(prompt: Prompt, max_new_tokens: int) -> BenchRun:
        asked.append((prompt.text, max_new_tokens))
        if len(asked) == 1:
            raise IndexError("theirs crash now and then")
        return BenchRun((1,), DecodeStats(num_tokens=1))

    return {"hf-generate": generate, "hf-uad": generate}


def test_transformers_answers_once_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(decoding, "huggingface", lambda names, setup: transformers_methods(asked))
    settings = METHODS["dm"].settings("a-target", PLAN)
    ways = decoding.huggingface_ways(settings, ("hf-generate", "hf-uad"), 96)
    assert asked == [(WARM_UP_TEXT, WARM_UP_TOKENS)] * 2
    assert ways["hf-uad"](Prompt("question"))["num_tokens"] == 1
    assert asked[2:] == [("question", 96)]


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
