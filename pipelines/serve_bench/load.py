"""Many clients for minutes: every answer right, no error but the 429s that a full queue owes, and memory that stays."""

import asyncio
import time
from statistics import fmean, quantiles
from typing import Any

import psutil

from pipelines.lib.check_result import CheckResult
from pipelines.lib.progress import bar
from pipelines.serve_bench.clients import ClientTally, ask_all
from pipelines.serve_bench.server import ServeBenchPlan, serving

LOOK_EVERY_S = 1.0
GROWTH = 0.03
"""Of memory, from the second quarter of the time to the last."""
QUEUE_SHARE = 0.75
"""Of the clients fit into the queue, so that some are refused."""


def run(plan: ServeBenchPlan) -> CheckResult:
    """As many clients as the plan says, recording and queueing as by default."""
    tally = ClientTally()
    with serving(plan, "load", f"max_queue = {int(plan.clients * QUEUE_SHARE)}") as server:
        rss_mib = asyncio.run(_ask_and_look(server.url, server.pid, plan, tally))
    figures = figures_of(tally, rss_mib, plan)
    return CheckResult(figures, promises(figures))


def promises(figures: dict[str, Any]) -> dict[str, bool]:
    """From the figures of this part."""
    name = f"{figures['clients']} clients, {figures['seconds']:g} s"
    return {
        f"{name}: no error but the 429s that a full queue owes": figures["num_errors"] == 0,
        f"{name}: the server's memory is flat": figures["rss_growth_share"] <= GROWTH,
    }


async def _ask_and_look(url: str, pid: int, plan: ServeBenchPlan, tally: ClientTally) -> list[float]:
    process, rss_mib = psutil.Process(pid), []
    asking = asyncio.create_task(ask_all(url, plan.clients, plan.seconds, tally, plan.seed))
    started = told_s = time.monotonic()
    with bar(f"seconds of load by {plan.clients} clients", round(plan.seconds)) as advance:
        while not asking.done():
            rss_mib.append(process.memory_info().rss / 2**20)
            await asyncio.wait([asking], timeout=LOOK_EVERY_S)
            now_s = min(time.monotonic(), started + plan.seconds)
            advance(now_s - told_s)
            told_s = now_s
    asking.result()
    return rss_mib


def figures_of(tally: ClientTally, rss_mib: list[float], plan: ServeBenchPlan) -> dict[str, Any]:
    """For the report."""
    quarter = max(1, len(rss_mib) // 4)
    second, last = fmean(rss_mib[quarter : 2 * quarter] or rss_mib), fmean(rss_mib[-quarter:])
    cuts = quantiles(tally.latencies_s, n=100) if len(tally.latencies_s) > 1 else [0.0] * 99
    return {
        "clients": plan.clients,
        "seconds": plan.seconds,
        "answers": dict(tally.by_kind),
        "answers_per_s": round(sum(tally.by_kind.values()) / plan.seconds, 1),
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
