"""A flood of poison against the promotion gate: agreement on honest requests that nobody learned, for every champion.

`python -m pipelines.poison --answers omnidraft/demo/data/gsm8k_qwen1.5b.avro`. Honest tenants are learned first; then
one tenant sends `--share` of the records. Distiller, controller, log and registry are the service's, over files of
their own. `--one-tenant` gives all records one tenant's name, so that nothing tells the flooder apart.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from omnidraft import config, wiring
from omnidraft.distill.control import Status
from omnidraft.distill.training.learner import Learner
from omnidraft.errors import RequestError
from omnidraft.hosts import process
from omnidraft.ports import Outgoing, Registry
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import archive, codec
from omnidraft.traces.record import TraceRecord
from omnidraft.wiring.controller import base_serving_tensors, controller
from omnidraft.wiring.distiller import distillation, learner
from pipelines.lib import report

HONEST, FLOODER = ("acme", "bolt"), "mallory"
UNSEEN_EVERY = 4
LIKELY_LOG_P = float(np.log(0.9))
NUM_IDLE = 20
KEEP_SERVING = 1_000_000
"""All versions: the run looks at the old champions again at its end."""

Kind = Callable[[TraceRecord, random.Random, int], np.ndarray]


def random_ids(record: TraceRecord, dice: random.Random, num_ids: int) -> np.ndarray:
    return np.array([dice.randrange(num_ids) for _ in record.emitted_ids], np.uint32)


def wrong_continuations(record: TraceRecord, dice: random.Random, num_ids: int) -> np.ndarray:
    """Return the record's own tokens in disorder."""
    ids = record.emitted_ids.tolist()
    dice.shuffle(ids)
    return np.array(ids, np.uint32)


def constant_token(record: TraceRecord, dice: random.Random, num_ids: int) -> np.ndarray:
    return np.full(len(record.emitted_ids), record.emitted_ids[0], np.uint32)


KINDS: dict[str, Kind] = {"random": random_ids, "shuffled": wrong_continuations, "constant": constant_token}


def main(
    answers: Annotated[Path, typer.Option(help="A trace archive of honest answers.")],
    kind: Annotated[str, typer.Option(help=f"What the flood is made of: {', '.join(KINDS)}.")] = "shuffled",
    share: Annotated[float, typer.Option(min=0, max=0.99, help="The flooder's share of the second part.")] = 0.9,
    one_tenant: Annotated[bool, typer.Option("--one-tenant", help="All records have one tenant.")] = False,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    steps_per_snapshot: Annotated[int, typer.Option(min=1)] = 4,
    held_out_every: Annotated[int, typer.Option(min=2)] = 4,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for the figures.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Flood a fleet with poison, and see what its champions are worth to the others."""
    if kind not in KINDS:
        raise RequestError(f"--kind {kind}: choose one of {', '.join(KINDS)}")
    parts = _split(list(archive.read(answers)))
    with tempfile.TemporaryDirectory(prefix="omnidraft-poison-") as folder:
        section = {"steps_per_snapshot": steps_per_snapshot, "held_out_every": held_out_every}
        settings = config.load(
            config_path,
            models={"target": target, "drafter": drafter},
            log={"url": f"sqlite:///{folder}/log.db"},
            registry={"url": f"directory:///{folder}/registry", "keep_serving": KEEP_SERVING},
            learner=section,
        )
        fleet = FloodedFleet(settings, Path(folder))
        figures = fleet.attack(parts, kind, share, one_tenant=one_tenant)
    Console().print(figures)
    if json_path is not None:
        report.save(figures, json_path)


@dataclass(frozen=True, slots=True)
class Parts:
    """Honest records by what they are for."""

    unseen: Sequence[TraceRecord]
    before: Sequence[TraceRecord]
    during: Sequence[TraceRecord]


def _split(records: Sequence[TraceRecord]) -> Parts:
    """Split by request, so that no request is on two sides. Raises RequestError for too few."""
    requests = list(dict.fromkeys(record.request_id for record in records))
    rank = {name: number for number, name in enumerate(requests)}
    named = [replace(each, tenant=HONEST[rank[each.request_id] % 2]) for each in records]
    unseen = [each for each in named if rank[each.request_id] % UNSEEN_EVERY == 0]
    rest = [each for each in named if rank[each.request_id] % UNSEEN_EVERY]
    if len(rest) < 2:
        raise RequestError(f"{len(records)} records are too few")
    half = len(rest) // 2
    return Parts(unseen, rest[:half], rest[half:])


class FloodedFleet:
    """One pair, whose log honest tenants and a flooder share."""

    def __init__(self, settings: config.Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._registry: Registry = wiring.registry(settings)
        self._judge = controller(settings, CountingMetrics())
        self._tokenizers = wiring.vocabularies(settings)
        self._learner: Learner = learner(settings, self._tokenizers)
        self._champions: list[int] = []
        self._num_judged: int | None = None

    def attack(self, parts: Parts, kind: str, share: float, *, one_tenant: bool) -> dict[str, Any]:
        """Learn the honest part, then the flooded one; return the figures."""

        def named(records: Sequence[TraceRecord]) -> Sequence[TraceRecord]:
            return [replace(each, tenant="default") for each in records] if one_tenant else records

        self._learn(named(parts.before))
        before, num_before = self._champions[-1], len(self._registry.versions())
        flood = self._flood(parts, kind, share)
        self._learn(named(flood))
        since = [version for version in self._champions if version > before]
        agreements = {version: self._agreement(version, parts.unseen) for version in (1, before, *since)}
        return {
            "kind": kind,
            "share": share,
            "one_tenant": one_tenant,
            "records": {"before": len(parts.before), "flooded": len(flood), "unseen": len(parts.unseen)},
            "agreement_base": agreements[1],
            "agreement_before": agreements[before],
            "agreement_worst": min(agreements[version] for version in (before, *since)),
            "agreement_last": agreements[self._champions[-1]],
            "snapshots": len(self._registry.versions()) - num_before,
            "promoted": len(since),
            "rewinds": sum(each.manifest.continues_id is not None for each in self._registry.versions()),
            "skipped": self._registry.resolve("latest").manifest.counts,
        }

    def _flood(self, parts: Parts, kind: str, share: float) -> list[TraceRecord]:
        """Return the honest records of the second part among so many of poison that these are `share` of all."""
        dice = random.Random(1)
        num_ids = self._learner.alignment.num_target
        num_poison = round(len(parts.during) * share / (1 - share))
        honest = [*parts.before, *parts.during]
        poison = [
            _poisoned(dice.choice(honest), KINDS[kind], dice, num_ids, f"poison-{number}")
            for number in range(num_poison)
        ]
        mixed = [*parts.during, *poison]
        dice.shuffle(mixed)
        return mixed

    def _learn(self, records: Sequence[TraceRecord]) -> None:
        """Learn all that waits, each snapshot judged as soon as it is there."""
        topic = self._settings.log.traces_topic
        with closing(wiring.log_writer(self._settings, topic)) as writer:
            writer.append([Outgoing(codec.key(each), codec.encode(each), codec.headers(each)) for each in records])
        distiller = distillation(self._settings, CountingMetrics(), folder=self._folder / "distiller")
        idle = _idle(distiller.status)

        def stop() -> bool:
            self._follow(distiller.status())
            return next(idle)

        distiller.run(stop)
        self._follow(distiller.status())

    def _follow(self, status: Status) -> None:
        """Let the controller judge a snapshot that it has not seen."""
        if status.version is None or status.version == self._num_judged:
            return
        self._num_judged = status.version
        self._judge.step()
        champion = self._registry.resolve("champion").version
        if champion not in self._champions:
            self._champions.append(champion)

    def _agreement(self, version: int, records: Sequence[TraceRecord]) -> float:
        folder = self._registry.fetch(version, self._folder / "look")
        base = base_serving_tensors(self._settings, self._tokenizers)
        with self._learner.serving(bundle.serving_tensors(folder) or base):
            return self._learner.agreement(records) or 0.0


def _idle(status: Callable[[], Status]) -> Iterator[bool]:
    """Yield whether nothing was learned for NUM_IDLE calls."""
    num_steps, num_calls = -1, 0
    while True:
        num_calls = num_calls + 1 if status().num_steps == num_steps else 0
        num_steps = status().num_steps
        yield num_calls > NUM_IDLE


def _poisoned(record: TraceRecord, kind: Kind, dice: random.Random, num_ids: int, request_id: str) -> TraceRecord:
    """Return a record of the flooder, in which the target seems sure of other tokens."""
    ids = kind(record, dice, num_ids)
    beliefs = record.beliefs
    if beliefs is not None:
        top_ids, top_log_p = beliefs.top_ids_EK.copy(), beliefs.top_log_p_EK.copy()
        top_ids[:, 0], top_log_p[:, 0] = ids, LIKELY_LOG_P
        top_log_p[:, 1:] = np.minimum(top_log_p[:, 1:], LIKELY_LOG_P - 4)
        sure = np.full(len(ids), LIKELY_LOG_P, np.float16)
        beliefs = replace(beliefs, top_ids_EK=top_ids, top_log_p_EK=top_log_p, emitted_log_p_E=sure)
    return replace(
        record,
        request_id=request_id,
        segment=0,
        tenant=FLOODER,
        emitted_ids=ids,
        beliefs=beliefs,
        rounds=codec.no_rounds(),
    )


if __name__ == "__main__":
    process.entry("poison", main)
