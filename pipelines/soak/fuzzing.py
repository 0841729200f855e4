"""Hostile records through the learner's source: every one is learned from, passed over, or dead-lettered, once."""

from statistics import median

from pipelines.fuzz import __main__
from pipelines.lib.check_result import CheckResult
from pipelines.soak.plan import SoakPlan

MOST_GROWTH = 1.1
"""Of the peak memory, from the first tenth of the batches to the last."""


def run(plan: SoakPlan) -> CheckResult:
    """A message without a fate, or with two, ends the part: ContractError."""
    figures = __main__.run(plan.fuzzed, seed=plan.seed, processes=plan.threads)
    peaks = figures["peaks_rss_mib"]
    tenth = max(1, len(peaks) // 10)
    growth = median(peaks[-tenth:]) / median(peaks[:tenth])
    num_accounted = sum(figures["fates"].values())
    promises = {
        f"all {plan.fuzzed:,} hostile records are learned, passed over or dead-lettered, each once": num_accounted
        == plan.fuzzed,
        f"memory stays within {MOST_GROWTH:.0%} of where it was at first": growth <= MOST_GROWTH,
    }
    return CheckResult(
        figures | {"growth": round(growth, 3), "per_s": round(plan.fuzzed / figures["seconds"])}, promises
    )
