"""An audit over the log that real distillers learned from, where a test plants a fault."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omnidraft.audit.findings import FaultKind, Report
from omnidraft.audit.run import DiscardingWriter, audit, dead_letter_reasons
from omnidraft.bus.sqlite_log import SqliteReader, SqliteWriter
from omnidraft.distill.ingest import dead_letters
from omnidraft.distill.ingest.batcher import seen_keys
from omnidraft.distill.ingest.record_disposition import SEEN_RECORDS
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.distill.publisher import BATCHER
from omnidraft.ports import Outgoing, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from tests.distiller_runs import Setting

HELD_OUT_EVERY = 5
CLEAN = {FaultKind.LOST: 0, FaultKind.LEARNED_TWICE: 0, FaultKind.MISCOUNTED: 0}


@dataclass
class Case:
    """The input of an audit, in which tests plant faults."""

    path: Path
    num_partitions: int
    versions: Sequence[SnapshotVersion]
    seen_keys: frozenset[int] | None
    alignment: str
    held_out_every: int = HELD_OUT_EVERY
    seen_records: int = SEEN_RECORDS

    def audit(self) -> Report:
        reader = SqliteReader(self.path, "t", partitions=self.num_partitions)
        reasons = dead_letter_reasons("t", dead_letters.read(SqliteReader(self.path, "dead"), idle_s=0))
        pair = {"target": "target", "drafter": "drafter"}
        source = TraceConsumer(reader, DiscardingWriter(), self.alignment, CountingMetrics(), topic="t", **pair)
        options = {
            "seen_keys": self.seen_keys,
            "held_out_every": self.held_out_every,
            "seen_records": self.seen_records,
            "idle_s": 0,
        }
        return audit(source, reader.end_offsets(), self.versions, reasons, **options)

    def kinds(self) -> dict[FaultKind, int]:
        report = self.audit()
        return {kind: report.num(kind) for kind in FaultKind}

    def execute(self, statement: str) -> None:
        with sqlite3.connect(self.path) as connection:
            assert connection.execute(statement).rowcount > 0

    def copy(self, path: Path) -> "Case":
        """One in which faults can be planted, and none in this one."""
        with sqlite3.connect(self.path) as source, sqlite3.connect(path) as target:
            source.backup(target)
        return replace(self, path=path)

    def retell(self, place: int, **changes: object) -> None:
        """The manifest of one version says something else."""
        versions = list(self.versions)
        manifest = versions[place].manifest.model_copy(update=changes)
        versions[place] = replace(versions[place], manifest=manifest)
        self.versions = versions


def case_of(setting: Setting) -> Case:
    """The log of a setting as it is now, in SQLite, where things can be planted; offsets are the same."""
    path, num_partitions = setting.folder / "log.db", setting.log.num_partitions
    for topic, number in (("t", num_partitions), ("dead", 1)):
        writer = SqliteWriter(path, topic, partitions=number)
        for kept in setting.log.topic(topic):
            writer.append([Outgoing(message.key, message.value, message.headers) for message in kept])
    versions = setting.registry.versions()
    folder = setting.registry.fetch(versions[-1].version, setting.folder / "resume", ("resume",))
    keys = seen_keys(bundle.tensors(folder, BATCHER))
    return Case(path, num_partitions, versions, keys, setting.pair.alignment.fingerprint)
