"""Faults at random moments in every process of a fleet and in its networks, under requests and learning."""

import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from resource import RLIM_INFINITY
from typing import Any, NamedTuple

from omnidraft import assembly
from omnidraft.config import Settings
from omnidraft.decode.generation import GenerationRequest
from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.retrying import retry
from omnidraft.ports import Outgoing, Sampling
from omnidraft.telemetry.metrics import CountingMetrics
from tests.soak import hostile_messages, uninterrupted, verdict
from tests.soak.acknowledged import AckMonitor
from tests.soak.cluster import ALL, BROKER, REGISTRY, SERVICES, WORKERS, Cluster, empty_folder, tiny_settings
from tests.soak.load_clients import PROMPTS, TEMPERATURE, Tally, load
from tests.soak.part import PartResult, SoakPlan

logger = logging.getLogger(__name__)

PROCESSES = (*WORKERS, BROKER, REGISTRY, "actor", "distiller", "controller")
"""`actor` is the process that learns, `distiller` the one that started it."""
VICTIMS = {
    "kill": PROCESSES,
    "stop": PROCESSES,
    "full disk": PROCESSES,
    "wrong clock": SERVICES,
    "lost packets": (BROKER, REGISTRY),
    "refused connections": (BROKER, REGISTRY),
    "lies": ("trace topic",),
}
"""Kind of fault -> what it is done to: SIGKILL; SIGSTOP and SIGCONT later; no byte can be written to a file, and so
on. Lies are records of anything by whoever may write to the topic."""
LASTS_S = (0.5, 2.0, 12.0)
"""How long a fault lasts; the last one is longer than clients of broker and registry wait."""
STEPS_S = (-400 * 86_400.0, -3_600.0, 3_600.0, 400 * 86_400.0)
"""How far a clock is put ahead."""
NUM_LIES = 40
MIN_GAP = 0.1
"""The shortest time between two faults as a share of the average."""
AWAY = 2
"""The exit code of a service that starts while broker or registry is away."""
CLIENT_PAUSE_S = 0.3
MAX_TOKENS = 24
DOWN_S = 0.3
"""Seconds between a kill and the restart."""
WHOLE_SHARE = 0.4
"""The share of faults that wait until all processes are back; the others may come while one is still down."""
DRAIN_TIMEOUT_S = 240.0
EVIDENCE = "evidence.json"


def run(plan: SoakPlan) -> PartResult:
    """Do it, drain, judge, and learn the log once more without interruption."""
    folder = empty_folder(plan.out / "faults")
    with Cluster(folder, tiny_settings(plan.out / "models"), has_networks=True) as cluster:
        evidence, figures = run_faults(cluster, plan)
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
        "everything in the log at the last fault is accounted for by the last snapshot": figures["unlearned"] == 0,
        "no service ends but one that starts without broker or registry": not figures["died"],
        "the final weights are those of an uninterrupted run, bit for bit": figures["uninterrupted"][
            "weights_equal_bit_for_bit"
        ],
    }


def run_faults(cluster: Cluster, plan: SoakPlan) -> tuple[verdict.Evidence, dict[str, Any]]:
    """Run the fleet through all faults; return what clients received, and figures. Broker and registry go on
    running."""
    plain = plain_texts(cluster.settings)
    cluster.start_all()
    monitors = {name: AckMonitor(url) for name, url in cluster.urls.items()}
    faults = Faults(cluster, monitors, plan)
    with ExitStack() as clients:
        tallies = []
        for name, acks in monitors.items():
            acks.start()
            asking = load(cluster.urls[name], acks, num_clients=1, pause_s=CLIENT_PAUSE_S, max_tokens=MAX_TOKENS)
            tallies.append(clients.enter_context(asking))
        faults.do(plan.minutes)
        num_unlearned = _drain(cluster)
        for tally in tallies:
            cluster.wait_for(partial(_serves_champion, cluster, tally), "champion served", DRAIN_TIMEOUT_S)
    for acks in monitors.values():
        cluster.wait_for(partial(_all_acknowledged, acks), "acknowledgement of the last records", DRAIN_TIMEOUT_S)
        acks.stop()
    exit_codes = {name: cluster.stop(name) for name in reversed(SERVICES)}
    evidence = verdict.Evidence(
        [reply for tally in tallies for reply in tally.replies],
        [beginning for tally in tallies for beginning in tally.beginnings],
        plain,
        frozenset(name for acks in monitors.values() for name in acks.acknowledged),
        sum(acks.num_acknowledged for acks in monitors.values()),
    )
    failures = [failure for tally in tallies for failure in tally.failures]
    return evidence, faults.figures() | {
        "tries": sum(tally.num_tries for tally in tallies),
        "streams_that_broke_off": len(evidence.beginnings),
        "traces_dropped": sum(acks.num_dropped for acks in monitors.values()),
        "requests_failed": len(failures),
        "failures": failures[:5],
        "unlearned": num_unlearned,
        "exit_codes": exit_codes,
    }


def plain_texts(settings: Settings) -> list[str]:
    """Return the answer to each prompt by plain decoding, computed before anything happens."""
    worker = assembly.engine(settings, CountingMetrics())
    texts = []
    for number, text in enumerate(PROMPTS):
        request = GenerationRequest(
            messages=[{"role": "user", "content": text}],
            max_new_tokens=MAX_TOKENS,
            sampling=Sampling(temperature=TEMPERATURE),
            seed=number,
            num_draft_tokens=0,
        )
        texts.append("".join(step.text for step in worker.engine.stream(request).steps))
    return texts


class Fault(NamedTuple):
    """What is done to whom."""

    kind: str
    victim: str


def schedule(rng: random.Random) -> Iterator[Fault]:
    """Yield faults in random order without end, each as often as the others."""
    faults = [Fault(kind, victim) for kind, victims in VICTIMS.items() for victim in victims]
    while True:
        rng.shuffle(faults)
        yield from faults


class Faults:
    """Does faults to a cluster in an order that the plan's seed decides, and times how processes come back."""

    def __init__(self, cluster: Cluster, monitors: Mapping[str, AckMonitor], plan: SoakPlan) -> None:
        self._cluster, self._monitors, self._pace_s = cluster, monitors, plan.pace_s
        self._rng = random.Random(plan.seed)
        self._started_s = time.monotonic()
        self._done: list[tuple[float, Fault]] = []
        self._lasting: dict[str, tuple[float, Callable[[], None]]] = {}
        """Victim -> when its fault is over, and what ends it."""
        self._ended: list[tuple[str, int, str]] = []
        """Processes that ended by themselves, with exit code and last words."""
        self._recovering: dict[str, float] = {}
        self._recovery_s: dict[str, list[float]] = defaultdict(list)
        cluster.on_end = self._on_end

    def do(self, minutes: float) -> None:
        """Do faults for so long, each to who is ready; return when all are over."""
        waiting, faults, until_s = list[Fault](), schedule(self._rng), time.monotonic() + 60 * minutes
        while time.monotonic() < until_s:
            if self._rng.random() < WHOLE_SHARE:
                self._cluster.wait_for(self._is_whole, "whole fleet", DRAIN_TIMEOUT_S)
            gap_s = self._pace_s * (MIN_GAP + self._rng.expovariate(1 / (1 - MIN_GAP)))
            self._cluster.supervise(gap_s, self._look)
            waiting.append(next(faults))
            while (fault := next(filter(self._is_possible, waiting), None)) is None:
                self._cluster.supervise(0.2, self._look)
            waiting.remove(fault)
            logger.info("%s: %s", *fault)
            self._do(fault)
            self._done.append((time.monotonic() - self._started_s, fault))
        self._cluster.wait_for(self._is_whole, "whole fleet", DRAIN_TIMEOUT_S)

    def figures(self) -> dict[str, Any]:
        """Return the fields of the report."""
        counts = Counter(fault for _, fault in self._done)
        died = [each for each in self._ended if each[0] in SERVICES and each[1] != AWAY]
        return {
            "num_faults": len(self._done),
            "faults_by_kind": dict(Counter(fault.kind for _, fault in self._done)),
            "faults_by_victim": {f"{kind}: {victim}": num for (kind, victim), num in sorted(counts.items())},
            "faults_at_s": [[round(second, 1), *fault] for second, fault in self._done],
            "ended_by_themselves": dict(Counter(name for name, _, _ in self._ended)),
            "died": died,
            "minutes": round(self._done[-1][0] / 60, 1) if self._done else 0.0,
            "recovery_s": {name: _spread(seconds) for name, seconds in self._recovery_s.items()},
        }

    def _is_possible(self, fault: Fault) -> bool:
        """Return whether the victim is there and has no fault at present."""
        victim = BROKER if fault.kind == "lies" else fault.victim
        return victim not in self._lasting and self._cluster.is_ready(victim)

    def _do(self, fault: Fault) -> None:
        """Begin a fault; one that lasts is ended by `_look`."""
        cluster, victim = self._cluster, fault.victim
        end: Callable[[], None] | None = None
        match fault.kind:
            case "kill":
                self._kill(victim)
            case "stop":
                cluster.pause(victim)
                end = partial(cluster.resume, victim)
            case "full disk":
                cluster.limit_files(victim, 0)
                end = partial(cluster.limit_files, victim, RLIM_INFINITY)
            case "wrong clock":
                cluster.set_clock(victim, self._rng.choice(STEPS_S))
                end = partial(cluster.set_clock, victim, 0.0)
            case "lost packets":
                cluster.networks[victim].lose()
                end = cluster.networks[victim].mend
            case "refused connections":
                cluster.networks[victim].refuse()
                end = cluster.networks[victim].mend
            case "lies":
                self._lie()
        if end is not None:
            self._lasting[victim] = time.monotonic() + self._rng.choice(LASTS_S), end
        elif fault.kind == "kill":
            self._recovering[victim] = time.monotonic()

    def _kill(self, victim: str) -> None:
        """Kill a process and start it again; Ray restarts the actor."""
        if victim in self._monitors:
            with self._monitors[victim].worker_dies():
                self._cluster.kill(victim)
        else:
            self._cluster.kill(victim)
        if victim != "actor":
            time.sleep(DOWN_S)
            self._cluster.bring_up(victim)

    def _lie(self) -> None:
        """Write hostile messages that were made from those in the log."""
        settings, seed = self._cluster.settings, self._rng.random()
        topic = settings.log.traces_topic
        with closing(assembly.log_reader(settings, topic)) as reader:
            sound = [Outgoing(each.key, each.value, each.headers) for each in topic_scan.messages(reader)]
        lies = hostile_messages.messages(sound, NUM_LIES, seed=seed) if sound else ()
        with closing(assembly.log_writer(settings, topic)) as writer:
            writer.append([replace(lie, key=verdict.LIE + lie.key) for lie in lies])

    def _on_end(self, name: str, returncode: int, last: str) -> None:
        self._ended.append((name, returncode, last))
        if name in self._monitors:
            self._monitors[name].end_life()

    def _is_whole(self) -> bool:
        self._look()
        return not self._lasting and all(self._cluster.is_ready(name) for name in ALL)

    def _look(self) -> None:
        """End faults that are over, and note who is back."""
        now_s = time.monotonic()
        for victim in [victim for victim, (over_s, _) in self._lasting.items() if over_s <= now_s]:
            self._lasting.pop(victim)[1]()
            self._recovering[victim] = now_s
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
        versions = registry.versions(1)
        offsets = versions[-1].manifest.offsets if versions else {}
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
