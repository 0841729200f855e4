"""What became of the promises in a fleet that was killed over and over: judged from log, registry and answers."""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnidraft import wiring
from omnidraft.audit.findings import FaultKind, PartitionReport
from omnidraft.config import Settings
from omnidraft.distill.ingest import topic_scan
from omnidraft.errors import SnapshotCorrupt, SnapshotNotFound, WireError
from omnidraft.traces import codec
from omnidraft.wiring.audit import audit
from pipelines.lib import report
from pipelines.soak.load_clients import QUESTIONS, Reply

BASE = "base"
"""What a worker without a snapshot calls its drafter."""
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen from outside."""

    replies: Sequence[tuple[int, Reply]]
    beginnings: Sequence[tuple[int, str]]
    plain: Sequence[str]
    """The answer to each question by plain decoding."""
    acknowledged: Set[str]
    """Ids of requests whose record the worker counted as acknowledged."""
    num_acknowledged: int
    """That workers counted, each life as far as it was seen."""

    def save(self, path: Path) -> None:
        """As JSON, so that a fleet can be judged again."""
        plain_data = asdict(self) | {"acknowledged": sorted(self.acknowledged)}
        report.save(plain_data, path)


def load(path: Path) -> Evidence:
    """What `Evidence.save` wrote."""
    said = json.loads(path.read_text())
    replies = [(question, Reply(**reply)) for question, reply in said.pop("replies")]
    return Evidence(replies=replies, acknowledged=frozenset(said.pop("acknowledged")), **said)


def judge(settings: Settings, evidence: Evidence) -> dict[str, Any]:
    """Figures; all but the first few are numbers of faults."""
    in_log = _in_log(settings)
    found = audit(settings)
    missing = evidence.acknowledged - in_log.keys()
    uncounted = max(0, evidence.num_acknowledged - len(in_log))
    corrupt = _corrupt(settings, evidence)
    return {
        "answers": len(evidence.replies),
        "records_in_log": sum(in_log.values()),
        "requests_in_log": len(in_log),
        "acknowledged_by_name": len(evidence.acknowledged),
        "acknowledged_by_count": evidence.num_acknowledged,
        "snapshots": found.num_snapshots,
        "snapshots_served": len({reply.snapshot_id for _, reply in evidence.replies} - {BASE}),
        "fates": _dispositions(found.partitions),
        "acknowledged_lost": max(len(missing), uncounted) + found.num(FaultKind.LOST),
        "learned_twice": found.num(FaultKind.LEARNED_TWICE),
        "miscounted": found.num(FaultKind.MISCOUNTED),
        "corrupt_served": len(corrupt),
        "faults": [fault.what for fault in found.faults][:SHOWN] + corrupt[:SHOWN] + sorted(missing)[:SHOWN],
    }


def _in_log(settings: Settings) -> Mapping[str, int]:
    """Request id -> records of it; a record that was sent again after an outage is there twice."""
    found: Counter[str] = Counter()
    with closing(wiring.log_reader(settings, settings.log.traces_topic)) as reader:
        for message in topic_scan.messages(reader):
            try:
                found[codec.decode(message.value, message.headers).request_id] += 1
            except WireError:
                continue  # the audit tells what became of it
    return found


def _corrupt(settings: Settings, evidence: Evidence) -> list[str]:
    """A line for every answer that came from a snapshot which is not whole, or that plain decoding does not give."""
    whole = _whole_snapshots(settings, {reply.snapshot_id for _, reply in evidence.replies} - {BASE})
    lines = []
    for question, reply in evidence.replies:
        if reply.text != evidence.plain[question]:
            lines.append(f"{reply.request_id} of snapshot {reply.snapshot_id}: not plain decoding's text")
        elif not whole.get(reply.snapshot_id, reply.snapshot_id == BASE):
            lines.append(f"{reply.request_id}: snapshot {reply.snapshot_id} is not in the registry, or not whole")
    wrong = [question for question, begun in evidence.beginnings if not evidence.plain[question].startswith(begun)]
    return lines + [f"a stream that broke off did not begin as {QUESTIONS[question]!r} does" for question in wrong]


def _whole_snapshots(settings: Settings, served: Set[str]) -> dict[str, bool]:
    """Of those in the registry that were served, whether their files have their manifests' checksums."""
    registry, whole = wiring.registry(settings), {}
    for version in registry.versions():
        if version.manifest.snapshot_id not in served:
            continue
        with tempfile.TemporaryDirectory(prefix="omnidraft-soak-") as staging:
            try:
                registry.fetch(version.version, Path(staging))
            except (SnapshotCorrupt, SnapshotNotFound):
                whole[version.manifest.snapshot_id] = False
            else:
                whole[version.manifest.snapshot_id] = True
    return whole


def _dispositions(partitions: Sequence[PartitionReport]) -> Mapping[str, int]:
    return sum((Counter(partition.fates) for partition in partitions), Counter[str]())
