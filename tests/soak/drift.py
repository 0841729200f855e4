"""Traffic changes its task under a whole fleet with real models: agreement falls, is announced, and recovers."""

import json
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from omnidraft import assembly, prompts
from omnidraft.config import Settings
from omnidraft.demo.measure import ChatClient
from omnidraft.distill.ingest import topic_scan
from omnidraft.fleet.request_stats import RequestStats, request_stats
from omnidraft.progress import bar
from omnidraft.traces import codec
from tests.soak.cluster import ALL, Cluster, empty_folder
from tests.soak.part import PartResult, SoakPlan

MAX_TOKENS = 64
WINDOW = 8
"""The number of requests in a moving mean of agreement."""
SETTLED = 15
"""The number of last requests before the change whose mean is the level of agreement."""
RECOVERED = 0.9
MIN_FALL = 0.03
SETTLE_S = 5.0
"""Time for the controller to read the last records."""


class Event(NamedTuple):
    """One announcement."""

    time_ms: int
    kind: str
    reason: str | None


def run(plan: SoakPlan) -> PartResult:
    """Serve both tasks, one after the other, while the fleet learns."""
    texts = [prompts.read(plan.data / f"{task}.jsonl", plan.phase_requests) for task in plan.tasks]
    with Cluster(empty_folder(plan.out / "drift"), _toml(plan)) as cluster:
        cluster.start_all(ALL[:-1])  # one worker
        client, changed_ms = ChatClient(cluster.url, max_tokens=MAX_TOKENS), 0
        with bar(f"requests, {' then '.join(plan.tasks)}", sum(map(len, texts))) as advance:
            for of_task in texts:
                changed_ms = time.time_ns() // 1_000_000
                for prompt in of_task:
                    client.ask(prompt.text, store=True)
                    cluster.restart_ended()
                    advance()
        time.sleep(SETTLE_S)
        requests, events = _requests(cluster.settings), _events(cluster.settings)
    figures = figures_of(requests, events, changed_ms) | {"tasks": list(plan.tasks), "target": plan.target}
    return PartResult(figures, assertions(figures))


def assertions(figures: dict[str, Any]) -> dict[str, bool]:
    """Check the figures of this part."""
    return {
        "no fall is told while traffic stays the same": figures["alarms_before"] == 0,
        "agreement falls with the task, and that is told": figures["level"] - figures["fell_to"] >= MIN_FALL
        and figures["told_after_requests"] is not None,
        f"agreement is back above {RECOVERED:.0%} of its level": figures["recovered_after_requests"] is not None,
    }


def figures_of(requests: Sequence[RequestStats], events: Sequence[Event], changed_ms: int) -> dict[str, Any]:
    """Return the figures of the report, counted in requests since the change."""
    agreements = [each.num_agreed / max(each.num_drafted, 1) for each in requests]
    changed_at = sum(each.time_ms < changed_ms for each in requests)
    after = agreements[changed_at:]
    level = fmean(agreements[:changed_at][-SETTLED:])

    def num_until(kind: str) -> int | None:
        """Return the number of requests from the change to the first announcement of this kind after it."""
        told_ms = next((each.time_ms for each in events if each.kind == kind and each.time_ms >= changed_ms), None)
        return None if told_ms is None else sum(changed_ms <= each.time_ms <= told_ms for each in requests)

    means = ((end, fmean(after[end - WINDOW : end])) for end in range(WINDOW, len(after) + 1))
    alarms = [each for each in events if each.kind == "drift"]
    return {
        "requests_before": changed_at,
        "requests_after": len(after),
        "level": round(level, 4),
        "fell_to": round(fmean(after[:WINDOW]), 4),
        "end": round(fmean(after[-SETTLED:]), 4),
        "alarms_before": sum(each.time_ms < changed_ms for each in alarms),
        "told_after_requests": num_until("drift"),
        "over_after_requests": num_until("drift_over"),
        "recovered_after_requests": next((end for end, mean in means if mean >= RECOVERED * level), None),
        "snapshots_served": sorted({each.version for each in requests if each.version is not None}),
        "events": [f"{(each.time_ms - changed_ms) / 1000:+.0f} s {each.kind}: {each.reason}" for each in alarms],
        "agreements": [round(each, 4) for each in agreements],
    }


def _requests(settings: Settings) -> list[RequestStats]:
    messages = topic_scan.messages(assembly.log_reader(settings, settings.log.traces_topic))
    records = [request_stats(codec.decode(message.value, message.headers)) for message in messages]
    return sorted(records, key=lambda each: each.time_ms)


def _events(settings: Settings) -> list[Event]:
    events = []
    for message in topic_scan.messages(assembly.log_reader(settings, settings.log.control_topic)):
        entry = json.loads(message.value)
        kind = entry["key"].split("/")[0] + ("_over" if entry["value"] is None else "")
        events.append(Event(message.timestamp_ms, kind, entry["reason"]))
    return events


def _toml(plan: SoakPlan) -> str:
    return f"""\
[models]
target = "{plan.target}"
drafter = "{plan.drafter}"
[decode]
threads = {plan.threads}
[learner]
records_per_step = 2
steps_per_snapshot = 6
held_out_every = 8
threads = 1
[controller]
tolerance = 0.05
[worker]
poll_s = 0.5
"""
