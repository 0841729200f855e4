"""SIGKILL at random moments over worker, distiller, broker and registry, under requests and learning."""

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from omnidraft import assembly
from omnidraft.config import Settings
from omnidraft.decode.generation import GenerationRequest
from omnidraft.distill.retrying import retry
from omnidraft.ports import Sampling
from omnidraft.progress import bar
from omnidraft.telemetry.metrics import CountingMetrics
from tests.soak import uninterrupted, verdict
from tests.soak.acknowledged import AckMonitor
from tests.soak.cluster import ALL, SERVICES, Cluster, empty_folder, tiny_settings
from tests.soak.load_clients import PROMPTS, Tally, load
from tests.soak.part import PartResult, SoakPlan

SHARES = {"decode_worker": 25, "broker": 20, "registry": 20, "actor": 15, "distiller": 10, "controller": 10}
"""Kills of each process in a hundred. `actor` is the one that learns, `distiller` the one that started it."""
MIN_GAP = 0.1
"""The shortest time between two kills as a share of the average."""
NUM_CLIENTS = 2
CLIENT_PAUSE_S = 0.3
MAX_TOKENS = 24
DOWN_S = 0.3
"""Seconds between a kill and the restart."""
WHOLE_SHARE = 0.4
"""The share of kills that wait until all processes are back; the others may come while one is still down."""
DRAIN_TIMEOUT_S = 240.0
EVIDENCE = "evidence.json"


def run(plan: SoakPlan) -> PartResult:
    """Kill, drain, judge, and learn the log once more without interruption."""
    folder = empty_folder(plan.out / "kills")
    with Cluster(folder, tiny_settings(plan.out / "models")) as cluster:
        evidence, figures = run_kills(cluster, plan)
        evidence.save(folder / EVIDENCE)
        figures |= verdict.judge(cluster.settings, evidence)
        figures["uninterrupted"] = uninterrupted.compare(cluster.settings, folder / "uninterrupted")
    return PartResult(figures, assertions(figures))


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
    killer = Killer(cluster, acks, plan)
    acks.start()
    clients = load(cluster.url, acks, num_clients=NUM_CLIENTS, pause_s=CLIENT_PAUSE_S, max_tokens=MAX_TOKENS)
    with clients as tally:
        killer.kill_all(plan.kills)
        num_unlearned = _drain(cluster)
        cluster.wait_for(lambda: _serves_champion(cluster, tally), "champion served", DRAIN_TIMEOUT_S)
    cluster.wait_for(lambda: _all_acknowledged(acks), "acknowledgement of the last records", DRAIN_TIMEOUT_S)
    acks.stop()
    exit_codes = {name: cluster.stop(name) for name in reversed(SERVICES)}
    evidence = verdict.Evidence(
        tally.replies, tally.beginnings, plain, frozenset(acks.acknowledged), acks.num_acknowledged
    )
    return evidence, killer.figures() | {
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
    worker = assembly.engine(settings, CountingMetrics())
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


def victims(num: int, rng: random.Random) -> list[str]:
    """Return `num` victims in random order, each as often as its share says, rounded."""
    total = sum(SHARES.values())
    whole = {name: share * num // total for name, share in SHARES.items()}
    rest = sorted(SHARES, key=lambda name: -(SHARES[name] * num % total))[: num - sum(whole.values())]
    names = [name for name, times in whole.items() for _ in range(times)] + rest
    rng.shuffle(names)
    return names


def pick(waiting: list[str], is_ready: Callable[[str], bool]) -> str | None:
    """Remove the first name from `waiting` that is ready, and return it; None when none is."""
    for name in dict.fromkeys(waiting):
        if is_ready(name):
            waiting.remove(name)
            return name
    return None


class Killer:
    """Kills the processes of a cluster in an order that the plan's seed decides, and times how they come back."""

    def __init__(self, cluster: Cluster, acks: AckMonitor, plan: SoakPlan) -> None:
        self._cluster, self._acks, self._pace_s = cluster, acks, plan.pace_s
        self._rng = random.Random(plan.seed)
        self._started_s = time.monotonic()
        self._killed: list[tuple[float, str]] = []
        self._ended = Counter[str]()
        self._recovering: dict[str, float] = {}
        self._recovery_s: dict[str, list[float]] = defaultdict(list)
        cluster.on_end = self._on_end

    def kill_all(self, num: int) -> None:
        """Kill `num` times, each time one that is ready."""
        waiting = victims(num, self._rng)
        with bar("kills", num) as advance:
            while waiting:
                if self._rng.random() < WHOLE_SHARE:
                    self._cluster.wait_for(self._is_whole, "whole fleet", DRAIN_TIMEOUT_S)
                gap_s = self._pace_s * (MIN_GAP + self._rng.expovariate(1 / (1 - MIN_GAP)))
                self._cluster.supervise(gap_s, self._note_recovered)
                while (victim := pick(waiting, self._cluster.is_ready)) is None:
                    self._cluster.supervise(0.2, self._note_recovered)
                self._recovering[victim] = time.monotonic()
                self._kill(victim)
                self._killed.append((time.monotonic() - self._started_s, victim))
                advance()
        self._cluster.supervise(0.0, self._note_recovered)

    def figures(self) -> dict[str, Any]:
        """Return the fields of the report."""
        last_s = self._killed[-1][0]
        return {
            "kills": len(self._killed),
            "kills_by_victim": {name: [each for _, each in self._killed].count(name) for name in SHARES},
            "kills_at_s": [[round(second, 1), victim] for second, victim in self._killed],
            "ended_by_themselves": dict(self._ended),
            "minutes": round(last_s / 60, 1),
            "recovery_s": {name: _spread(seconds) for name, seconds in self._recovery_s.items()},
        }

    def _kill(self, victim: str) -> None:
        """Kill a process and start it again; Ray restarts the actor."""
        if victim == "decode_worker":
            with self._acks.worker_dies():
                self._cluster.kill(victim)
        else:
            self._cluster.kill(victim)
        if victim != "actor":
            time.sleep(DOWN_S)
            self._cluster.bring_up(victim)

    def _on_end(self, name: str) -> None:
        self._ended[name] += 1
        self._acks.on_process_end(name)

    def _is_whole(self) -> bool:
        self._note_recovered()
        return all(self._cluster.is_ready(name) for name in ALL)

    def _note_recovered(self) -> None:
        for name in [name for name in self._recovering if self._cluster.is_ready(name)]:
            self._recovery_s[name].append(time.monotonic() - self._recovering.pop(name))


def _drain(cluster: Cluster) -> int:
    """Wait until the newest snapshot covers all that is in the log now, while clients go on, so that batches fill.

    Returns the number of records that it does not cover in time.
    """
    cluster.wait_until_ready(*ALL)
    deadline = time.monotonic() + DRAIN_TIMEOUT_S

    def is_late() -> bool:
        return time.monotonic() > deadline

    topic = cluster.settings.log.traces_topic
    with closing(retry(lambda: assembly.log_reader(cluster.settings, topic), is_late)) as reader:
        ends = reader.end_offsets()
    registry = assembly.registry(cluster.settings)

    def num_uncovered() -> int:
        offsets = registry.resolve("latest").manifest.offsets
        return sum(max(0, end - offsets.get(partition, 0)) for partition, end in ends.items())

    while (left := num_uncovered()) and not is_late():
        cluster.supervise(0.5)
    return left


def _serves_champion(cluster: Cluster, tally: Tally) -> bool:
    """Return whether the last answer came from the champion."""
    champion = assembly.registry(cluster.settings).resolve("champion")
    return bool(tally.replies) and tally.replies[-1][1].snapshot_id == champion.manifest.snapshot_id


def _all_acknowledged(acks: AckMonitor) -> bool:
    counts = acks.poll()
    return counts is not None and counts["acknowledged"] + counts["dropped"] == counts["emitted"]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": round(ordered[len(ordered) // 2], 1), "longest": round(ordered[-1], 1)}
