"""A tenant that sends nine tenths of the records, all of them poison, does not make the champion worse for the others.

Distiller, controller, registry and control log are the real ones, with the service's own limits; the drafter is tiny.
Agreement is measured on requests of the honest tenants that nobody learned or held out, for every champion that served.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from omnidraft.config import ControllerSettings, LearnerSettings
from omnidraft.distill.control import Status, TrainingControl
from omnidraft.distill.evaluation.held_out import HeldOut, read_pinned
from omnidraft.distill.ingest.batcher import HELD_OUT_RECORDS
from omnidraft.distill.ingest.tenant_shares import TENANT_SHARE, TenantGroups
from omnidraft.fleet.controller import Controller
from omnidraft.fleet.drift_recovery import REWIND_AFTER, Rewinds
from omnidraft.fleet.lease import ControllerLease
from omnidraft.fleet.request_stats import RequestStatsReader
from omnidraft.ports import Outgoing
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryReader, MemoryWriter
from omnidraft.traces import archive, codec
from omnidraft.traces.record import TraceRecord
from tests.control_logs import control_over
from tests.distiller_runs import Setting, SlowReader, run_until_idle
from tests.tiny_pair import Pair

HONEST = ("acme", "bolt")
TEXTS = {
    "acme": ("The river goes into the sea, and the water of the river stays. ", "The sea stays where it was. "),
    "bolt": ("def add(first, second):\n    return first + second\n", "def first(add):\n    return add + 12\n"),
}
NUM_HONEST, NUM_FLOOD, POISONED_SHARE = 440, 800, 0.9
HELD_OUT_EVERY, STEPS_PER_SNAPSHOT = 4, 4
MARGIN = 0.02
"""Agreement that a champion may lose on unseen requests: what the gate sees are 24 held-out records, two thirds of them
of the honest tenants."""
DAMAGE = 0.10
"""Agreement that it loses at least where nothing protects it: the attack is one."""

Poison = Callable[[Pair, random.Random], list[int]]


def honest_ids(pair: Pair, tenant: str, dice: random.Random) -> list[int]:
    return pair.target.encode("".join(dice.choice(TEXTS[tenant]) for _ in range(2)))


def random_ids(pair: Pair, dice: random.Random) -> list[int]:
    return [dice.randrange(len(pair.target.vocabulary) - 4) for _ in range(30)]


def wrong_continuations(pair: Pair, dice: random.Random) -> list[int]:
    """The tokens of honest answers, each followed by what never follows it."""
    ids = [*honest_ids(pair, "acme", dice), *honest_ids(pair, "bolt", dice)]
    dice.shuffle(ids)
    return ids[:30]


def constant_token(pair: Pair, dice: random.Random) -> list[int]:
    return [pair.target.encode(" the")[0]] * 30


KINDS: dict[str, Poison] = {
    "random ids": random_ids,
    "wrong continuations": wrong_continuations,
    "a constant token": constant_token,
}


@dataclass
class FloodedFleet:
    """One pair whose trace log honest tenants and a flooder share."""

    pair: Pair
    folder: Path
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    rewind_after: int | None = REWIND_AFTER
    numbers: Iterator[int] = field(default_factory=itertools.count)
    dice: random.Random = field(default_factory=lambda: random.Random(5))

    def __post_init__(self) -> None:
        self.setting = Setting(self.pair, self.folder, learning_rate=1e-2)
        self.measuring = self.pair.learner()
        self.unseen = [self.honest(tenant) for tenant in HONEST for _ in range(12)]
        lease = ControllerLease(control_over(self.setting.log, target="target", drafter="drafter"))
        traffic = RequestStatsReader(MemoryReader(self.setting.log, "none"), target="target", drafter="drafter")
        services = (self.setting.registry, lease, traffic, CountingMetrics(), ControllerSettings())
        self.controller = Controller(*services, target="target")
        self.controller._rewinds = Rewinds(lease, "target", self.rewind_after)
        self.champions: list[int] = []
        self.num_judged = 0

    def honest(self, tenant: str, name: str | None = None) -> TraceRecord:
        number = next(self.numbers)
        ids = honest_ids(self.pair, tenant, self.dice)
        return self.pair.record(f"{tenant}-{number}", emitted=ids, seed=number, tenant=name or tenant)

    def poison(self, kind: str, name: str) -> TraceRecord:
        number = next(self.numbers)
        return self.pair.record(f"poison-{number}", emitted=KINDS[kind](self.pair, self.dice), seed=number, tenant=name)

    def flood(self, kind: str, num: int, name: Callable[[int], str]) -> list[TraceRecord]:
        return [
            self.poison(kind, name(number))
            if self.dice.random() < POISONED_SHARE
            else self.honest(self.dice.choice(HONEST))
            for number in range(num)
        ]

    def send(self, records: Sequence[TraceRecord]) -> None:
        writer = MemoryWriter(self.setting.log, "t")
        writer.append([Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in records])

    def learn(self) -> None:
        """Learn all that waits, each snapshot judged as soon as it is there."""
        limits, groups = self.learner, TenantGroups(self.learner.tenants)
        control = control_over(self.setting.log, target="target", drafter="drafter")
        path, fingerprint = limits.pinned_held_out, self.pair.alignment.fingerprint
        pinned = None if path is None else read_pinned(path, fingerprint)
        distiller, _ = self.setting.distiller(
            reader=SlowReader(self.setting.log, "t", 64),
            held_out_every=HELD_OUT_EVERY,
            limits={
                "records_per_step": limits.records_per_step,
                "held_out_records": HELD_OUT_RECORDS,
                "tenant_share": TENANT_SHARE,
                "groups": groups,
            },
            held_out=lambda learner: HeldOut(learner, groups=groups, pinned=pinned),
            steps_per_snapshot=STEPS_PER_SNAPSHOT,
            control=TrainingControl(control),
            progress=self.judge,
        )
        run_until_idle(distiller, 200)  # a step may need many polls: most of what they bring is left out

    def judge(self, status: Status) -> None:
        if status.version is None or status.version == self.num_judged:
            return
        self.num_judged = status.version
        self.controller.step()
        champion = self.setting.registry.resolve("champion").version
        if champion not in self.champions:
            self.champions.append(champion)

    def agreement(self, version: int) -> float:
        """Return a snapshot's agreement on honest requests that nobody saw."""
        folder = self.setting.registry.fetch(version, self.folder / "look")
        with self.measuring.serving(bundle.serving_tensors(folder) or self.pair.learner().serving_tensors()):
            return self.measuring.agreement(self.unseen) or 0.0

    def rewinds(self) -> int:
        return sum(each.manifest.continues_id is not None for each in self.setting.registry.versions())


def attacked(fleet: FloodedFleet, kind: str, name: Callable[[int], str], num: int = NUM_FLOOD) -> dict[str, float]:
    """Let a fleet learn from honest traffic, then from a flood; return the figures."""
    fleet.send([fleet.honest(HONEST[number % 2]) for number in range(NUM_HONEST)])
    fleet.learn()
    before, last = fleet.agreement(fleet.champions[-1]), fleet.champions[-1]
    num_before = len(fleet.setting.registry.versions())
    fleet.send(fleet.flood(kind, num, name))
    fleet.learn()
    since = [version for version in fleet.champions if version > last]
    agreements = [fleet.agreement(version) for version in since] or [before]
    figures = {
        "before": before,
        "worst": min(agreements),
        "last": agreements[-1],
        "promoted": len(since),
        "snapshots": len(fleet.setting.registry.versions()) - num_before,
        "rewinds": fleet.rewinds(),
        "newest": fleet.agreement(fleet.setting.registry.resolve("latest").version),
    }
    assert figures["snapshots"] > 0  # the flood was learned from, and the gate asked
    print(kind, {name: round(value, 3) for name, value in figures.items()})
    return figures


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("random ids", marks=pytest.mark.long),
        "wrong continuations",
        pytest.param("a constant token", marks=pytest.mark.long),
    ],
)
def test_a_champion_does_not_get_worse_by_one_tenants_flood_of_poison(pair: Pair, tmp_path: Path, kind: str) -> None:
    figures = attacked(FloodedFleet(pair, tmp_path), kind, lambda number: "mallory")
    assert figures["before"] > 0.5
    assert figures["worst"] > figures["before"] - MARGIN


def test_where_nothing_tells_tenants_apart_the_same_flood_ruins_the_champion(pair: Pair, tmp_path: Path) -> None:
    """So the test before would fail without the gate: here all requests are one tenant's."""
    fleet = FloodedFleet(pair, tmp_path)
    fleet.honest = lambda tenant, name=None: FloodedFleet.honest(fleet, tenant, "default")  # type: ignore[method-assign]
    figures = attacked(fleet, "a constant token", lambda number: "default", num=400)
    assert figures["worst"] < figures["before"] - DAMAGE
    assert figures["promoted"] > 0


@pytest.mark.long
def test_a_flooder_with_a_name_for_every_request_gains_nothing_where_the_tenants_are_named(
    pair: Pair, tmp_path: Path
) -> None:
    fleet = FloodedFleet(pair, tmp_path, LearnerSettings(tenants=HONEST))
    figures = attacked(fleet, "wrong continuations", lambda number: f"sybil-{number}")
    assert figures["worst"] > figures["before"] - MARGIN


@pytest.mark.long
def test_a_pinned_file_judges_where_nothing_tells_tenants_apart(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "pinned.avro"
    fleet = FloodedFleet(pair, tmp_path, LearnerSettings(pinned_held_out=path))
    archive.write(path, [fleet.honest(tenant) for tenant in HONEST for _ in range(8)])
    fleet.honest = lambda tenant, name=None: FloodedFleet.honest(fleet, tenant, "default")  # type: ignore[method-assign]
    figures = attacked(fleet, "a constant token", lambda number: "default", num=400)
    assert figures["worst"] > figures["before"] - MARGIN
    manifests = [each.manifest for each in fleet.setting.registry.versions() if each.version in fleet.champions[1:]]
    told = [each.pinned.after for each in manifests if each.pinned]
    assert told
    assert told == sorted(told)


@pytest.mark.long
@pytest.mark.parametrize("limit", [None, 3], ids=["never", "after three"])
def test_learning_goes_on_from_the_champion_and_not_from_what_was_refused(
    pair: Pair, tmp_path: Path, limit: int | None
) -> None:
    """Never going back is what the limit is for: the lineage that learning goes on with is ruined."""
    fleet = FloodedFleet(pair, tmp_path, rewind_after=limit)
    figures = attacked(fleet, "wrong continuations", lambda number: "mallory")
    rewound = [each.version for each in fleet.setting.registry.versions() if each.manifest.continues_id]
    assert bool(rewound) is bool(limit)
    assert all(fleet.agreement(version) > figures["before"] - MARGIN for version in rewound)
    assert limit or figures["newest"] < figures["before"] - DAMAGE
