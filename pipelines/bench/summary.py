"""The benchmark's figures: one row per task and method.

Speeds are of decoding alone, without the first pass. A speed-up is the median over prompts of the ratio of two
methods' speeds on the same prompt.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from omnidraft.decode.step_stats import DecodeStats
from pipelines.bench.methods import BASELINES
from pipelines.bench.runs import BenchRun, Failure, Outcome

Row = dict[str, Any]


def rows(
    task: str, outcomes: Mapping[str, Sequence[Outcome]], *, is_greedy: bool, plain_name: str = "plain"
) -> list[Row]:
    """Return a row per method, over the prompts that were measured so far; unknown values are None."""
    return [_row(task, name, outcomes, plain_name, is_greedy=is_greedy) for name in outcomes]


def _row(task: str, name: str, outcomes: Mapping[str, Sequence[Outcome]], plain_name: str, *, is_greedy: bool) -> Row:
    done = [each for each in outcomes[name] if isinstance(each, BenchRun)]
    failures = [each.reason for each in outcomes[name] if isinstance(each, Failure)]
    base_name = BASELINES.get(name, plain_name)
    plain, base = _pairs(outcomes, name, plain_name), _pairs(outcomes, name, base_name)
    total = sum((run.stats for run in done), DecodeStats())
    return {
        "task": task,
        "method": name,
        "tokens_per_s": _median([run.stats.tokens_per_s for run in done if run.stats.decode_s]),
        "tokens_per_pass": total.tokens_per_pass if done else None,
        "speedup": _speedup(plain),
        "speedup_of_totals": _speedup_of_totals(plain),
        "speedup_of_requests": _speedup_of_requests(base),
        "baseline": base_name,
        "speedup_over_baseline": _speedup(base),
        "agreement_by_depth": total.agreement_by_depth,
        "accepted_by_source": dict(total.accepted_by_source),
        "draft_share": _share(done, [run.draft_s for run in done]),
        "target_share": _share(done, [run.target_s for run in done]),
        "overhead_share": _share(done, [run.overhead_s for run in done]),
        "tracing_share": _tracing_share(base) if name == "omnidraft+traces" else None,
        "first_token_s": _median([run.stats.first_token_s for run in done]),
        "share_identical_to_plain": _identical(plain) if is_greedy else None,
        "share_identical_to_baseline": _identical(base) if is_greedy else None,
        "failed_prompts": len(failures),
        "failures": sorted(set(failures)),
    }


def _pairs(outcomes: Mapping[str, Sequence[Outcome]], name: str, base: str) -> list[tuple[BenchRun, BenchRun]]:
    """Return the runs of prompts that both methods completed."""
    both = zip(outcomes[name], outcomes.get(base, ()), strict=False)
    return [(mine, theirs) for mine, theirs in both if isinstance(mine, BenchRun) and isinstance(theirs, BenchRun)]


def _timed(pairs: Sequence[tuple[BenchRun, BenchRun]]) -> list[tuple[DecodeStats, DecodeStats]]:
    """Return the stats of runs that took more than one pass in both."""
    stats = [(mine.stats, theirs.stats) for mine, theirs in pairs]
    return [(mine, theirs) for mine, theirs in stats if mine.tokens_per_s and theirs.tokens_per_s]


def _speedup(pairs: Sequence[tuple[BenchRun, BenchRun]]) -> float | None:
    return _median([mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in _timed(pairs)])


def _speedup_of_requests(pairs: Sequence[tuple[BenchRun, BenchRun]]) -> float | None:
    """Return the speed-up with the first pass, so with the prefill."""
    speeds = [(mine.stats.request_tokens_per_s, theirs.stats.request_tokens_per_s) for mine, theirs in pairs]
    return _median([mine / theirs for mine, theirs in speeds if mine and theirs])


def _speedup_of_totals(pairs: Sequence[tuple[BenchRun, BenchRun]]) -> float | None:
    timed = _timed(pairs)
    if not timed:
        return None
    mine, theirs = (sum(each, DecodeStats()) for each in zip(*timed, strict=True))
    return mine.tokens_per_s / theirs.tokens_per_s


def _share(done: Sequence[BenchRun], parts_s: Sequence[float | None]) -> float | None:
    known = [part_s for part_s in parts_s if part_s is not None]
    total_s = sum(run.stats.decode_s for run in done)
    return sum(known) / total_s if known and total_s else None


def _tracing_share(pairs: Sequence[tuple[BenchRun, BenchRun]]) -> float | None:
    """Return the share that recording adds to a pass, by the overhead alone: the models' times only add noise."""
    traced, untraced = ([pair[index] for pair in pairs] for index in (0, 1))
    per_pass_s = [
        sum(run.overhead_s or 0.0 for run in runs) / max(sum(run.stats.num_passes - 1 for run in runs), 1)
        for runs in (traced, untraced)
    ]
    num_passes = sum(run.stats.num_passes - 1 for run in traced)
    total_s = sum(run.stats.decode_s for run in traced)
    return (per_pass_s[0] - per_pass_s[1]) * num_passes / total_s if total_s else None


def _identical(pairs: Sequence[tuple[BenchRun, BenchRun]]) -> float | None:
    return sum(mine.ids == theirs.ids for mine, theirs in pairs) / len(pairs) if pairs else None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
