"""Figures of decoded answers, each with its standard error over the questions.

A figure is a ratio of two sums over questions, so that long answers count as much as they are long.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from omnidraft.fleet.ratio import Ratio
from pipelines.bench.methods import BASELINES
from pipelines.paper_table.decoding import PLAIN, Run

Answers = Mapping[str, Run]
"""Way -> its answer to one question."""
Row = dict[str, Any]
Timed = Callable[[Run], tuple[float, int]]
"""Returns seconds of an answer, and the tokens that they gave."""
FIGURES = ("acceptance", "agreement", "tokens_per_pass", "speedup", "later_speedup", "own_speedup")
"""The fields of a row that have an error, in a field of the same name with `_error`."""


def rows(questions: Sequence[Answers], names: Iterable[str]) -> dict[str, Row]:
    """Return a row for each way that answered one of these questions, in the order of `names`."""
    return {name: _row(name, asked) for name in names if (asked := [each for each in questions if name in each])}


def _row(name: str, questions: Sequence[Answers]) -> Row:
    done = [each for each in questions if "failure" not in each[name]]
    runs = [each[name] for each in done]
    drafted, accepted = (_by_source(runs, field) for field in ("drafted_by_source", "accepted_by_source"))
    ratios = {
        "acceptance": [(sum(accepted.values()), sum(drafted.values())) for accepted, drafted in map(_counts, runs)],
        "agreement": [(run["num_agreed"], run["num_scored"]) for run in runs],
        "tokens_per_pass": [(run["num_tokens"], run["num_passes"]) for run in runs],
        "speedup": _seconds(name, PLAIN, done, _whole),
        "later_speedup": _seconds(name, PLAIN, done, _behind_first_pass),
        "own_speedup": _seconds(name, BASELINES[name], done, _whole) if name in BASELINES else [],
    }
    return {
        **{key: value for field, pairs in ratios.items() for key, value in _figure(field, pairs).items()},
        "drafted_by_source": dict(drafted),
        "accepted_by_source": dict(accepted),
        "same_texts": sum(each[name]["ids"] == each[PLAIN]["ids"] for each in done),
        "num_texts": len(done),
        "failures": sorted({each[name]["failure"] for each in questions if "failure" in each[name]}),
    }


def _figure(field: str, pairs: Sequence[tuple[float, float]]) -> Row:
    """Return a ratio and its error, None where it is unknown."""
    ratio = Ratio()
    for upper, lower in pairs:
        ratio.add(upper, lower)
    error = ratio.error
    return {field: ratio.estimate if ratio.x else None, f"{field}_error": error if isfinite(error) else None}


def _seconds(name: str, base: str, questions: Sequence[Answers], timed: Timed) -> list[tuple[float, float]]:
    """Return for each question the seconds that the other way takes for as many tokens, and those of this one."""
    both = [
        (*timed(each[name]), *timed(each[base])) for each in questions if base in each and "failure" not in each[base]
    ]
    return [
        (their_s / their_tokens * num_tokens, seconds)
        for seconds, num_tokens, their_s, their_tokens in both
        if their_tokens and seconds
    ]


def _whole(run: Run) -> tuple[float, int]:
    """Return the seconds and tokens of an answer, with the reading of its prompt by target and drafter."""
    return run["first_token_s"] + run["decode_s"], run["num_tokens"]


def _behind_first_pass(run: Run) -> tuple[float, int]:
    """Return those after the first pass; a drafter may have read the prompt in it, or reads it later."""
    return run["decode_s"], run["num_later_tokens"]


def _counts(run: Run) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return accepted and drafted tokens by source; a way that does not say what it drafted has neither."""
    drafted = run.get("drafted_by_source", {})
    return (run["accepted_by_source"], drafted) if drafted else ({}, {})


def _by_source(runs: Sequence[Run], field: str) -> Counter[str]:
    return sum((Counter(run.get(field, {})) for run in runs), Counter[str]())
