"""The report of a finished check as plain data, which `--json` writes and the table and the verdict are made of."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from omnidraft.decode.engine import Engine, Pair
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.exactness.check import CheckPlan, CheckRun
from omnidraft.exactness.compare import Difference, TextComparison
from omnidraft.exactness.distribution_test import DistributionTest

_CONTEXT_BYTES = 60


def report(runs: Sequence[CheckRun], plan: CheckPlan, engine: Engine) -> dict[str, Any]:
    """Return totals over all runs, the worst distribution test, and each run by itself."""
    rows = [_run(run, plan.prompts, engine.pair) for run in runs]
    return {
        "passed": all(run.passed for run in runs),
        "target": engine.pair.target,
        "drafter": engine.pair.drafter,
        "snapshot": engine.slot.current.snapshot_id,
        "fingerprint": engine.decoder.target.fingerprint,
        "seed": plan.seed,
        "max_new_tokens": plan.max_new_tokens,
        "concurrency": plan.concurrency,
        **{name: sum(row[name] for row in rows) for name in ("texts", "identical", "explained", "unexplained")},
        "law": _worst([test for run in runs for test in run.distribution_tests]),
        "runs": rows,
    }


def _run(run: CheckRun, prompts: Sequence[str], pair: Pair) -> dict[str, Any]:
    verdicts = [each.verdict for each in run.comparisons]
    stats = sum((each.stats for each in run.comparisons), DecodeStats())
    return {
        "passed": run.passed,
        "temperature": run.temperature,
        "mode": run.mode,
        "texts": len(verdicts),
        "identical": verdicts.count("identical"),
        "explained": verdicts.count("explained"),
        "unexplained": verdicts.count("unexplained"),
        "tokens": sum(len(each.answer) for each in run.comparisons),
        "scored": stats.num_scored,
        "agreement": stats.agreement,
        "tokens_per_pass": round(stats.tokens_per_pass, 4),
        "accepted_by_source": dict(stats.accepted_by_source),
        "rounding": asdict(run.rounding) | {"limit": run.rounding.limit} if run.rounding else None,
        "law": _worst(run.distribution_tests),
        "law_positions": [_distribution(test) for test in run.distribution_tests],
        "law_prompt": prompts[run.sampled_prompt],
        "differences": [
            _difference(difference, comparison, prompt, pair)
            for prompt, comparison in zip(prompts, run.comparisons, strict=True)
            for difference in comparison.differences
        ],
    }


def _worst(tests: Sequence[DistributionTest]) -> dict[str, Any]:
    """Return the test that failed, or came nearest to its limit."""
    return _distribution(max(tests, key=lambda test: (not test.passed, test.tv - test.tv_limit)))


def _distribution(test: DistributionTest) -> dict[str, Any]:
    return asdict(test) | {"passed": test.passed}


def _difference(difference: Difference, comparison: TextComparison, prompt: str, pair: Pair) -> dict[str, Any]:
    """Return one difference and its surroundings, in ids and in text."""
    vocabulary = pair.target_tokenizer.vocabulary

    def text_of(token: int | None) -> str | None:
        return None if token is None else vocabulary.spell([token]).decode(errors="backslashreplace")

    index = difference.index
    before = vocabulary.spell(comparison.answer[:index])[-_CONTEXT_BYTES:]
    after = vocabulary.spell(comparison.answer[index + 1 :])[:_CONTEXT_BYTES]
    return {
        "prompt": prompt,
        "position": index,
        "is_explained": difference.problem is None,
        "problem": difference.problem,
        "logit_difference": difference.logit_difference,
        "plain_token": difference.plain_token,
        "plain_text": text_of(difference.plain_token),
        "drafted_token": difference.drafted_token,
        "drafted_text": text_of(difference.drafted_token),
        "before": before.decode(errors="backslashreplace"),
        "after": after.decode(errors="backslashreplace"),
    }
