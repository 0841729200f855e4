"""SIGKILL at random moments over worker, distiller, broker and registry, under requests and learning."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from omnidraft import wiring
from omnidraft.config import Settings
from omnidraft.decode.generation import GenerationRequest
from omnidraft.demo.local_cluster import ServiceFailed, empty_folder
from omnidraft.distill.retrying import retry
from omnidraft.ports import Sampling
from omnidraft.progress import bar
from omnidraft.telemetry.metrics import CountingMetrics
from pipelines.lib.check_result import CheckResult
from pipelines.soak import kill_schedule, uninterrupted, verdict
from pipelines.soak.ack_monitor import AckMonitor
from pipelines.soak.cluster import BROKER, REGISTRY, SERVICES, START_TIMEOUT_S, Cluster, tiny_settings
from pipelines.soak.load_clients import PROMPTS, LoadClients, Tally
from pipelines.soak.plan import SoakPlan

NUM_CLIENTS = 2
CLIENT_PAUSE_S = 0.3
MAX_TOKENS = 24
DOWN_S = 0.3
"""Seconds between a kill and the restart."""
WHOLE_SHARE = 0.4
"""The share of kills that wait until all processes are back; the others may come while one is still down."""
DRAIN_TIMEOUT_S = 240.0
EVIDENCE = "evidence.json"


@dataclass(slots=True)
class History:
    """The kills and restarts of a run."""

    started_s: float = field(default_factory=time.monotonic)
    killed: list[tuple[float, str]] = field(default_factory=list)
    """(second since the start, victim)"""
    ended: list[str] = field(default_factory=list)
    """Processes that ended by themselves because a dependency was down; they were restarted too."""
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    """Victim -> seconds from each kill until it was ready again."""
    seconds: float = 0.0


def run(plan: SoakPlan) -> CheckResult:
    """Kill, drain, judge, and learn the log once more without interruption."""
    folder = empty_folder(plan.out / "kills")
    with Cluster(folder, tiny_settings(plan.out / "models")) as cluster:
        evidence, figures = run_kills(cluster, plan)
        evidence.save(folder / EVIDENCE)
        figures |= verdict.judge(cluster.settings, evidence)
        compared = uninterrupted.compare(cluster.settings, folder / "uninterrupted")
        figures["uninterrupted"] = compared.plain_data()
    return CheckResult(figures, assertions(figures))


def assertions(figures: dict[str, Any]) -> dict[str, bool]:
    """Check the figures of this part."""
    return {
        "no acknowledged trace is lost": figures["acknowledged_lost"] == 0,
        "no trace is learned twice": figures["learned_twice"] == 0 and figures["miscounted"] == 0,
        "no corrupt snapshot is served, and every answer is plain decoding's": figures["corrupt_served"] == 0,
        "every request is answered": figures["requests_failed"] == 0 and figures["answers"] > 0,
        "everything in the log at the last kill is accounted for by the last snapshot": figures["unlearned"] == 0,
        "the final weights are those of an uninterrupted run, bit for bit": figures["uninterrupted"][
            "weights_equal_bit_for_bit"
        ],
    }


def run_kills(cluster: Cluster, plan: SoakPlan) -> tuple[verdict.Evidence, dict[str, Any]]:
    """Run the fleet through all kills; return what clients received, and figures. Broker and registry go on running."""
    plain = plain_texts(cluster.settings)
    cluster.start_all()
    acks = AckMonitor(cluster.url)
    cluster.on_end = acks.on_process_end
    acks.start()
    clients = LoadClients(cluster.url, acks, num_clients=NUM_CLIENTS, pause_s=CLIENT_PAUSE_S, max_tokens=MAX_TOKENS)
    with clients as tally:
        history = _kill_all(cluster, acks, plan)
        num_unlearned = _drain(cluster)
        cluster.wait_for(lambda: _serves_champion(cluster, tally), "champion served", DRAIN_TIMEOUT_S)
    cluster.wait_for(lambda: _all_acknowledged(acks), "acknowledgement of the last records", DRAIN_TIMEOUT_S)
    acks.stop()
    exit_codes = {name: cluster.processes.stop(name) for name in reversed(SERVICES)}
    evidence = verdict.Evidence(
        tally.replies, tally.beginnings, plain, frozenset(acks.acknowledged), acks.num_acknowledged
    )
    return evidence, {
        "kills": len(history.killed),
        "kills_by_victim": kill_schedule.counts_by_victim([victim for _, victim in history.killed]),
        "kills_at_s": [[round(second, 1), victim] for second, victim in history.killed],
        "answers_per_10s": _per_10s([reply.at_s - history.started_s for _, reply in tally.replies]),
        "ended_by_themselves": dict(Counter(history.ended)),
        "minutes": round(history.seconds / 60, 1),
        "recovery_s": {name: _spread(seconds) for name, seconds in history.recovery_s.items()},
        "tries": tally.num_tries,
        "streams_that_broke_off": len(tally.beginnings),
        "traces_dropped": acks.num_dropped,
        "requests_failed": len(tally.failures),
        "failures": tally.failures[:5],
        "unlearned": num_unlearned,
        "exit_codes": exit_codes,
    }


def plain_texts(settings: Settings) -> list[str]:
    """Return the answer to each prompt by plain decoding, computed before anything is killed."""
    worker = wiring.engine(settings, CountingMetrics())
    texts = []
    for number, text in enumerate(PROMPTS):
        request = GenerationRequest(
            messages=[{"role": "user", "content": text}],
            max_new_tokens=MAX_TOKENS,
            sampling=Sampling(temperature=0.0),
            seed=number,
            num_draft_tokens=0,
        )
        texts.append("".join(step.text for step in worker.engine.stream(request).steps))
    return texts


def _kill_all(cluster: Cluster, acks: AckMonitor, plan: SoakPlan) -> History:
    rng, history = random.Random(plan.seed), History()
    waiting = kill_schedule.order(plan.kills, rng)
    recovering: dict[str, float] = {}
    with bar("kills", plan.kills) as advance:
        while waiting:
            if rng.random() < WHOLE_SHARE:
                _heal(cluster, history, recovering)
            _supervise(cluster, history, recovering, time.monotonic() + kill_schedule.gap_s(plan.pace_s, rng))
            while (victim := kill_schedule.pick(waiting, lambda name: _can_be_killed(cluster, name))) is None:
                _supervise(cluster, history, recovering, time.monotonic() + 0.2)
            recovering[victim] = time.monotonic()
            _kill(cluster, acks, victim)
            history.killed.append((time.monotonic() - history.started_s, victim))
            advance()
        _supervise(cluster, history, recovering, time.monotonic())
    history.seconds = time.monotonic() - history.started_s
    return history


def _heal(cluster: Cluster, history: History, recovering: dict[str, float]) -> None:
    """Wait until all processes are ready. Raises ServiceFailed when that takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not all(cluster.is_ready(name) for name in (BROKER, REGISTRY, *SERVICES)):
        if _is_past(deadline):
            raise ServiceFailed(f"the fleet is not whole again after {START_TIMEOUT_S:.0f} s; see its logs")
        _supervise(cluster, history, recovering, time.monotonic() + 0.2)


def _can_be_killed(cluster: Cluster, victim: str) -> bool:
    return cluster.is_ready("distiller" if victim == "actor" else victim)


def _kill(cluster: Cluster, acks: AckMonitor, victim: str) -> None:
    """Kill a process and start it again; Ray restarts the actor."""
    if victim == "decode_worker":
        with acks.worker_dies():
            cluster.kill(victim)
    else:
        cluster.kill(victim)
    if victim != "actor":
        time.sleep(DOWN_S)
        cluster.start(victim)


def _supervise(cluster: Cluster, history: History, recovering: dict[str, float], until_s: float) -> None:
    """Restart what ends, and note which victims are ready again."""
    while True:
        history.ended += cluster.restart_ended()
        for name in [name for name in recovering if _can_be_killed(cluster, name)]:
            seconds = time.monotonic() - recovering.pop(name)
            history.recovery_s.setdefault(name, []).append(seconds)
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(0.1, left_s))


def _drain(cluster: Cluster) -> int:
    """Wait until the newest snapshot covers all that is in the log now, while clients go on, so that batches fill.

    Returns the number of records that it does not cover in time.
    """
    cluster.wait_until_ready((BROKER, REGISTRY, *SERVICES))
    topic = cluster.settings.log.traces_topic
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    with closing(retry(lambda: wiring.log_reader(cluster.settings, topic), lambda: _is_past(deadline))) as reader:
        ends = reader.end_offsets()
    registry = wiring.registry(cluster.settings)

    def num_uncovered() -> int:
        offsets = registry.resolve("latest").manifest.offsets
        return sum(max(0, end - offsets.get(partition, 0)) for partition, end in ends.items())

    while (left := num_uncovered()) and not _is_past(deadline):
        cluster.supervise(time.monotonic() + 0.5)
    return left


def _serves_champion(cluster: Cluster, tally: Tally) -> bool:
    """Return whether the last answer came from the champion."""
    champion = wiring.registry(cluster.settings).resolve("champion")
    return bool(tally.replies) and tally.replies[-1][1].snapshot_id == champion.manifest.snapshot_id


def _is_past(deadline: float) -> bool:
    return time.monotonic() > deadline


def _all_acknowledged(acks: AckMonitor) -> bool:
    counts = acks.poll()
    return counts is not None and counts["acknowledged"] + counts["dropped"] == counts["emitted"]


def _per_10s(seconds: Sequence[float]) -> list[int]:
    counts = Counter(int(second // 10) for second in seconds if second >= 0)
    return [counts[slot] for slot in range(max(counts, default=-1) + 1)]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": round(ordered[len(ordered) // 2], 1), "longest": round(ordered[-1], 1)}
