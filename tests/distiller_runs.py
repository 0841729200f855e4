"""Distillers that come and go over a log in memory and a registry of folders."""

import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from omnidraft.audit.run import DiscardingWriter
from omnidraft.config import MemorySettings
from omnidraft.distill.control import TrainingControl
from omnidraft.distill.distiller import Distiller
from omnidraft.distill.evaluation.held_out import HeldOut
from omnidraft.distill.evaluation.tenant_factors import FactorJudge
from omnidraft.distill.forgetting import Forgetting, RecordRetention
from omnidraft.distill.identity import Identity
from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.ingest.ingest import Ingest
from omnidraft.distill.ingest.poison_detector import PoisonDetector
from omnidraft.distill.ingest.record_disposition import SEEN_RECORDS, is_held_out
from omnidraft.distill.ingest.topic_scan import RecentRecords
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.distill.learning import Learning
from omnidraft.distill.memory.memory_files import MemoryFiles
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.distill.publisher import LEARNER, Publisher
from omnidraft.distill.retrying import Stop
from omnidraft.distill.training.learner import Learner, StepReport
from omnidraft.ports import Forget, Outgoing, PollResult
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from tests.control_logs import control_over

TEXTS = ("The river goes into the sea. ", "Where does the water go?", "def add(first, second): return first")


def no_wait(seconds: float, stop: Stop) -> None:
    """Waits not at all."""


class Killed(Exception):
    """Stands for SIGKILL: nothing of the process goes on."""


class SlowReader(MemoryReader):
    """Gives at most `most` messages a poll, and only of one partition."""

    def __init__(self, log: MemoryLog, topic: str, most: int) -> None:
        super().__init__(log, topic)
        self._most = most

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        return super().poll(min(max_messages, self._most), 0)


@dataclass
class Journal:
    """Notes the batches that a learner got, in order; it dies after `die_after` steps."""

    learner: Learner
    batches: list[tuple[str, ...]] = field(default_factory=list)
    die_after: int | None = None

    def __getattr__(self, name: str):
        return getattr(self.learner, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "cache":
            self.learner.cache = value
        elif name == "counters":
            self.learner.counters = value
        else:
            object.__setattr__(self, name, value)

    def step(self, records) -> StepReport:
        if len(self.batches) == self.die_after:
            raise Killed
        self.batches.append(tuple(record.request_id for record in records))
        return self.learner.step(records)


class Setting:
    """A log and a registry, and distillers that come and go."""

    def __init__(self, pair, folder: Path, *, partitions: int = 1, **learner) -> None:
        """`learner`: settings of all its learners."""
        self.pair, self.folder, self.learner = pair, folder, learner
        self.log = MemoryLog(partitions)
        self.registry = DirectoryRegistry(folder / "registry", "drafter", "target", keep_resume=2)

    def record(self, name: str, **changes) -> TraceRecord:
        """A record whose text and beliefs depend on its name, so that weights tell which records were learned."""
        number = zlib.crc32(name.encode())
        return self.pair.record(name, **{"text": TEXTS[number % 3], "seed": number} | changes)

    def names(self, num: int, start: int = 0, *, every: int = 3) -> list[str]:
        """Names of records, of which `held_out_every = every` holds out the first and each `every`th from there."""
        judges = [name for name in names(100, start) if is_held_out(self.record(name), every)]
        others = [name for name in names(100, start) if name not in judges]
        return [(others if number % every else judges).pop(0) for number in range(num)]

    def emit(self, *names: str, **changes) -> None:
        for name in names:
            record = self.record(name, **changes)
            MemoryWriter(self.log, "t").append(
                [Outgoing(codec.key(record), codec.encode(record), codec.headers(record))]
            )

    def distiller(
        self,
        *,
        die_after=None,
        registry=None,
        reader=None,
        held_out_every=0,
        seen_records=SEEN_RECORDS,
        limits=None,
        held_out=HeldOut,
        factor_judge=FactorJudge,
        batcher_class=Batcher,
        drafter_hash="hash",
        settings=None,
        cipher=None,
        retention=None,
        memory=None,
        metrics=None,
        poison_detector=None,
        truncation=None,
        max_lag_records=0,
        **changes,
    ):
        learner = Journal(self.pair.learner(**self.learner), die_after=die_after)
        reader = reader or SlowReader(self.log, "t", 3)
        letters, fingerprint = MemoryWriter(self.log, "dead"), self.pair.alignment.fingerprint
        names = {"target": "target", "drafter": "drafter"}
        retention = retention or RecordRetention()
        names["is_forgotten"] = retention.is_forgotten
        consumer = TraceConsumer(reader, letters, fingerprint, CountingMetrics(), topic="t", **names)
        numbers = {
            "records_per_step": 2,
            "held_out_every": held_out_every,
            "held_out_records": 4,
            "seen_records": seen_records,
        }
        batcher = batcher_class(reader.partitions(), **numbers | (limits or {}))
        identity = Identity("target", "drafter", drafter_hash, fingerprint, "full", "test", settings or {})
        metrics = metrics or CountingMetrics()
        texts = TextMemory(memory or MemorySettings(), vocabulary_size=len(self.pair.target.vocabulary))
        staging = self.folder / "staging"
        files = MemoryFiles(texts, staging / "memory", metrics, cipher)
        publisher = Publisher(registry or self.registry, identity, staging, files)
        forgetting = Forgetting(
            retention,
            batcher,
            learner,
            files,
            CountingMetrics(),
            new_cache=self.pair.cache,
            learned_records=RecentRecords(self._reader, lambda reader: self._consumer(reader, names), 16).before,
        )
        ingest = Ingest(consumer, batcher, metrics, truncation, max_lag_records=max_lag_records)
        learning = Learning(
            learner,
            batcher,
            load_cache=self.pair.load_cache,
            load_base=lambda: self.pair.learner(**self.learner).model.trained(),
            held_out=held_out(learner),
            factor_judge=factor_judge(learner),
            detector=poison_detector or PoisonDetector(self.folder, tries=0),
            memory=texts,
        )
        options = {"steps_per_snapshot": 2, "metrics": metrics, "wait": no_wait}
        return Distiller(ingest, learning, publisher, forgetting, **options | changes), learner

    def _reader(self) -> MemoryReader:
        return MemoryReader(self.log, "t")

    def _consumer(self, reader, names) -> TraceConsumer:
        return TraceConsumer(reader, DiscardingWriter(), None, CountingMetrics(), topic="t", **names)

    def manifest(self, version: str = "latest"):
        return self.registry.resolve(version).manifest

    def fetched(self) -> Path:
        """The newest snapshot, with all that its learner goes on from."""
        newest = self.registry.resolve("latest").version
        return self.registry.fetch(newest, self.folder / "look", ("serving", "resume"))

    def masters(self) -> dict[str, torch.Tensor]:
        return bundle.tensors(self.fetched(), LEARNER)

    def control(self) -> TrainingControl:
        """What is ordered on the control topic by now, and from now on."""
        return TrainingControl(control_over(self.log))

    def forget(self, tenant: str, *, until_ms: int, forget_id: str = "order", **changes) -> None:
        control_over(self.log).put(("forget", tenant), Forget(id=forget_id, until_ms=until_ms, **changes))


def until_idle(num_idle: int = 5):
    """Stops after this many checks in a row between which nothing was learned; for a drained log."""
    seen = {"status": None, "num": 0}

    def bind(distillation):
        def stop() -> bool:
            now = distillation.status().num_steps, distillation.status().version
            seen["num"] = seen["num"] + 1 if now == seen["status"] else 0
            seen["status"] = now
            return seen["num"] > num_idle

        return stop

    return bind


def run_until_idle(distillation, num_idle: int = 25) -> None:
    distillation.run(until_idle(num_idle)(distillation))


def names(num: int, start: int = 0) -> list[str]:
    return [f"request-{n:03d}" for n in range(start, start + num)]


def learned(*journals: Journal) -> list[str]:
    return [name for journal in journals for batch in journal.batches for name in batch]
