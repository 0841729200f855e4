"""Hostile records through the learner's consumer: each is learned from, skipped or dead-lettered, once."""

from statistics import median

from pipelines.fuzz import batches
from pipelines.lib.check_result import CheckResult
from pipelines.soak.plan import SoakPlan

MAX_GROWTH = 1.1
"""The growth of peak memory that is allowed from the first tenth of the batches to the last, as a ratio."""


def run(plan: SoakPlan) -> CheckResult:
    """Run the fuzz pipeline. Raises ContractError when a message has no disposition, or two."""
    figures = batches.run(plan.fuzzed, seed=plan.seed, processes=plan.threads)
    peaks = figures["peaks_rss_mib"]
    tenth = max(1, len(peaks) // 10)
    growth = median(peaks[-tenth:]) / median(peaks[:tenth])
    num_accounted = sum(figures["fates"].values())
    assertions = {
        f"all {plan.fuzzed:,} hostile records are learned, passed over or dead-lettered, each once": num_accounted
        == plan.fuzzed,
        f"memory stays within {MAX_GROWTH:.0%} of where it was at first": growth <= MAX_GROWTH,
    }
    return CheckResult(
        figures | {"growth": round(growth, 3), "per_s": round(plan.fuzzed / figures["seconds"])}, assertions
    )
