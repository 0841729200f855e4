"""Traffic changes its task under a whole fleet with real models: agreement falls, is announced, and recovers."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from omnidraft import prompts, wiring
from omnidraft.config import Settings
from omnidraft.demo.local_cluster import empty_folder
from omnidraft.demo.measure import ChatClient
from omnidraft.distill.ingest import topic_scan
from omnidraft.fleet import control_log
from omnidraft.fleet.drift import MIN_VALUES, DriftDetector
from omnidraft.fleet.request_stats import RequestStats, request_stats
from omnidraft.progress import bar
from omnidraft.traces import codec
from pipelines.lib.check_result import CheckResult
from pipelines.soak.cluster import Cluster
from pipelines.soak.plan import SoakPlan

MAX_TOKENS = 64
WINDOW = 8
"""The number of requests in a moving mean of agreement."""
SETTLED = 15
"""The number of last requests before the change whose mean is the level of agreement."""
RECOVERED = 0.9
MIN_FALL = 0.03
SETTLE_S = 5.0
"""Time for the controller to read the last records."""
RESAMPLED_VALUES = 20_000
RESAMPLED_FALLS = 200


@dataclass(frozen=True, slots=True)
class DriftRequest:
    """One served request."""

    stats: RequestStats

    @property
    def time_ms(self) -> int:
        return self.stats.time_ms

    @property
    def agreement(self) -> float:
        return self.stats.num_agreed / max(self.stats.num_drafted, 1)


@dataclass(frozen=True, slots=True)
class Event:
    """One announcement."""

    time_ms: int
    kind: str
    version: int | None
    reason: str | None


def run(plan: SoakPlan) -> CheckResult:
    """Serve both tasks, one after the other, while the fleet learns."""
    texts = [prompts.read(plan.data / f"{task}.jsonl", plan.phase_requests) for task in plan.tasks]
    with Cluster(empty_folder(plan.out / "drift"), _toml(plan)) as cluster:
        cluster.start_all()
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
    return CheckResult(figures, assertions(figures))


def assertions(figures: dict[str, Any]) -> dict[str, bool]:
    """Check the figures of this part."""
    return {
        "no fall is told while traffic stays the same": figures["alarms_before"] == 0,
        "agreement falls with the task, and that is told": figures["level"] - figures["fell_to"] >= MIN_FALL
        and figures["told_after_requests"] is not None,
        f"agreement is back above {RECOVERED:.0%} of its level": figures["recovered_after_requests"] is not None,
    }


def figures_of(requests: Sequence[DriftRequest], events: Sequence[Event], changed_ms: int) -> dict[str, Any]:
    """Return the figures of the report, counted in requests since the change."""
    before = [each for each in requests if each.time_ms < changed_ms]
    after = [each for each in requests if each.time_ms >= changed_ms]
    level = fmean(each.agreement for each in before[-SETTLED:])
    alarms = [each for each in events if each.kind == "drift"]
    detected_ms = next((each.time_ms for each in alarms if each.time_ms >= changed_ms), None)
    over_ms = next((each.time_ms for each in events if each.kind == "drift_over" and each.time_ms >= changed_ms), None)
    return {
        "requests_before": len(before),
        "requests_after": len(after),
        "level": round(level, 4),
        "fell_to": round(fmean(each.agreement for each in after[:WINDOW]), 4),
        "end": round(fmean(each.agreement for each in after[-SETTLED:]), 4),
        "alarms_before": sum(each.time_ms < changed_ms for each in alarms),
        "told_after_requests": _num_until(after, detected_ms),
        "over_after_requests": _num_until(after, over_ms),
        "recovered_after_requests": _recovered(after, RECOVERED * level),
        "snapshots_served": sorted({each.stats.version for each in requests if each.stats.version is not None}),
        "events": [f"{(each.time_ms - changed_ms) / 1000:+.0f} s {each.kind}: {each.reason}" for each in alarms],
        "resampled": resample(before[-2 * SETTLED :], after[:SETTLED]),
        "agreements": [round(each.agreement, 4) for each in requests],
        "changed_at": len(before),
    }


def resample(calm: Sequence[DriftRequest], fallen: Sequence[DriftRequest]) -> dict[str, Any]:
    """Return error rates of the default drift detector on requests drawn at random from these."""
    rng, detector, alarms = random.Random(0), DriftDetector(), 0
    for _ in range(RESAMPLED_VALUES):
        change = detector.update(rng.choice(calm).stats)
        alarms += change is not None and change.kind == "drift"
    delays = sorted(_delay(rng, calm, fallen) for _ in range(RESAMPLED_FALLS))
    return {
        "false_alarms_per_10000_requests": round(alarms / RESAMPLED_VALUES * 10_000, 2),
        "delay_median_requests": delays[len(delays) // 2],
        "delay_p90_requests": delays[int(len(delays) * 0.9)],
    }


def _delay(rng: random.Random, calm: Sequence[DriftRequest], fallen: Sequence[DriftRequest]) -> int:
    """Return the number of requests until the fall is detected, or the number tried when it is not."""
    detector = DriftDetector()
    for _ in range(3 * MIN_VALUES):
        detector.update(rng.choice(calm).stats)
    most = 10 * MIN_VALUES
    for number in range(1, most):
        change = detector.update(rng.choice(fallen).stats)
        if change is not None and change.kind == "drift":
            return number
    return most


def _num_until(requests: Sequence[DriftRequest], time_ms: int | None) -> int | None:
    return None if time_ms is None else sum(each.time_ms <= time_ms for each in requests)


def _recovered(requests: Sequence[DriftRequest], level: float) -> int | None:
    """Return the number of requests until the mean of the last WINDOW reaches this level; None when it does not."""
    agreements = [each.agreement for each in requests]
    means = ((end, fmean(agreements[end - WINDOW : end])) for end in range(WINDOW, len(agreements) + 1))
    return next((end for end, mean in means if mean >= level), None)


def _requests(settings: Settings) -> list[DriftRequest]:
    requests = []
    reader = wiring.log_reader(settings, settings.log.traces_topic)
    for message in topic_scan.messages(reader):
        requests.append(DriftRequest(request_stats(codec.decode(message.value, message.headers))))
    return sorted(requests, key=lambda each: each.time_ms)


def _events(settings: Settings) -> list[Event]:
    events = []
    for message in topic_scan.messages(wiring.log_reader(settings, settings.log.control_topic)):
        announcement = control_log.parse_announcement(message)
        events.append(Event(message.timestamp_ms, announcement.kind, announcement.version, announcement.reason))
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
poll_s = 0.5
tolerance = 0.05
[worker]
poll_s = 0.5
"""
