"""Many clients for minutes: every answer right, no error but the 429s of a full queue, and memory that stays."""

import time
from concurrent.futures import ThreadPoolExecutor, wait
from statistics import fmean, quantiles
from typing import Any

import psutil

from omnidraft.progress import bar
from pipelines.lib.check_result import CheckResult
from pipelines.serve_bench.clients import GONE, ClientTally, send_load
from pipelines.serve_bench.server import ServeBenchPlan, serving

SAMPLE_EVERY_S = 1.0
MAX_GROWTH = 0.03
"""The growth of memory that is allowed from the second quarter of the time to the last, as a share."""
QUEUE_SHARE = 0.75
"""The length of the server's queue as a share of the clients, so that some are refused."""


def run(plan: ServeBenchPlan) -> CheckResult:
    """Run the plan's clients against a server that records and queues as by default."""
    tally = ClientTally()
    with serving(plan, "load", f"max_queue = {int(plan.clients * QUEUE_SHARE)}") as server:
        rss_mib = _load(server.url, server.pid, plan, tally)
    figures = figures_of(tally, rss_mib, plan)
    return CheckResult(figures, assertions(figures))


def assertions(figures: dict[str, Any]) -> dict[str, bool]:
    """Check the figures of this part."""
    name = f"{figures['clients']} clients, {figures['seconds']:g} s"
    return {
        f"{name}: no error but the 429s that a full queue owes": figures["num_errors"] == 0,
        f"{name}: the server's memory is flat": figures["rss_growth_share"] <= MAX_GROWTH,
    }


def _load(url: str, pid: int, plan: ServeBenchPlan, tally: ClientTally) -> list[float]:
    """Return the server's memory in MiB, sampled while the clients run."""
    process, rss_mib = psutil.Process(pid), []
    started = shown_s = time.monotonic()
    with (
        bar(f"seconds of load by {plan.clients} clients", round(plan.seconds)) as advance,
        ThreadPoolExecutor(1) as thread,
    ):
        load = thread.submit(send_load, url, plan.clients, plan.seconds, tally, plan.seed)
        while not load.done():
            rss_mib.append(process.memory_info().rss / 2**20)
            wait([load], timeout=SAMPLE_EVERY_S)
            now_s = min(time.monotonic(), started + plan.seconds)
            advance(now_s - shown_s)
            shown_s = now_s
    load.result()
    return rss_mib


def figures_of(tally: ClientTally, rss_mib: list[float], plan: ServeBenchPlan) -> dict[str, Any]:
    """Return the figures of the report."""
    quarter = max(1, len(rss_mib) // 4)
    second, last = fmean(rss_mib[quarter : 2 * quarter] or rss_mib), fmean(rss_mib[-quarter:])
    cuts = quantiles(tally.latencies_s, n=100) if len(tally.latencies_s) > 1 else [0.0] * 99
    return {
        "clients": plan.clients,
        "seconds": plan.seconds,
        "answers": dict(tally.by_kind),
        "answers_per_s": round((tally.by_kind.total() - tally.by_kind[GONE]) / plan.seconds, 1),
        "tokens_per_s": round(tally.num_tokens / plan.seconds, 1),
        "refused_429": tally.num_refused,
        "num_errors": len(tally.errors),
        "errors": tally.errors[:20],
        "distinct_texts": len(tally.texts),
        "latency_p50_s": round(cuts[49], 3),
        "latency_p99_s": round(cuts[98], 3),
        "rss_mib_second_quarter": round(second, 1),
        "rss_mib_last_quarter": round(last, 1),
        "rss_growth_share": round(last / second - 1, 4),
        "rss_mib": [round(each, 1) for each in rss_mib],
    }
