"""The verdict on a fleet that was killed repeatedly: faults found in its log, registry and answers."""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnidraft import assembly
from omnidraft.assembly.fleet import audit
from omnidraft.audit.findings import FaultKind, PartitionReport
from omnidraft.config import Settings
from omnidraft.distill.ingest import topic_scan
from omnidraft.errors import SnapshotCorrupt, SnapshotNotFound, WireError
from omnidraft.files import save_json as save
from omnidraft.traces import codec
from tests.soak.load_clients import PROMPTS, ServedAnswer

BASE = "base"
"""The snapshot id of a worker without a snapshot."""
LIE = b"lie-"
"""How keys of messages begin that no worker wrote."""
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Evidence:
    """The observations of clients, and of the worker's counters."""

    replies: Sequence[tuple[int, ServedAnswer]]
    beginnings: Sequence[tuple[int, str]]
    plain: Sequence[str]
    """The answer to each prompt by plain decoding."""
    acknowledged: Set[str]
    """Ids of requests whose record the worker counted as acknowledged."""
    num_acknowledged: int
    """The number that workers counted, summed over their lives as far as their counters were read."""

    def save(self, path: Path) -> None:
        """Write it as JSON, so that a fleet can be judged again."""
        plain_data = asdict(self) | {"acknowledged": sorted(self.acknowledged)}
        save(plain_data, path)


def load(path: Path) -> Evidence:
    """Read the file that `Evidence.save` wrote."""
    content = json.loads(path.read_text())
    replies = [(prompt, ServedAnswer(**reply)) for prompt, reply in content.pop("replies")]
    return Evidence(replies=replies, acknowledged=frozenset(content.pop("acknowledged")), **content)


def judge(settings: Settings, evidence: Evidence) -> dict[str, Any]:
    """Return figures; all but the first few are numbers of faults."""
    in_log = _in_log(settings)
    audited = audit(settings)
    missing = evidence.acknowledged - in_log.keys()
    uncounted = max(0, evidence.num_acknowledged - len(in_log))
    corrupt = _corrupt(settings, evidence)
    return {
        "answers": len(evidence.replies),
        "records_in_log": sum(in_log.values()),
        "requests_in_log": len(in_log),
        "acknowledged_by_name": len(evidence.acknowledged),
        "acknowledged_by_count": evidence.num_acknowledged,
        "snapshots": audited.num_snapshots,
        "snapshots_served": len({reply.snapshot_id for _, reply in evidence.replies} - {BASE}),
        "fates": _dispositions(audited.partitions),
        "acknowledged_lost": max(len(missing), uncounted) + audited.num(FaultKind.LOST),
        "learned_twice": audited.num(FaultKind.LEARNED_TWICE),
        "miscounted": audited.num(FaultKind.MISCOUNTED),
        "corrupt_served": len(corrupt),
        "faults": [fault.what for fault in audited.faults][:SHOWN] + corrupt[:SHOWN] + sorted(missing)[:SHOWN],
    }


def _in_log(settings: Settings) -> Mapping[str, int]:
    """Return request id -> number of records; a record that was sent again after an outage counts twice."""
    counts: Counter[str] = Counter()
    with closing(assembly.log_reader(settings, settings.log.traces_topic)) as reader:
        for message in topic_scan.messages(reader):
            if message.key.startswith(LIE):
                continue
            try:
                counts[codec.decode(message.value, message.headers).request_id] += 1
            except WireError:
                continue  # the audit counts it
    return counts


def _corrupt(settings: Settings, evidence: Evidence) -> list[str]:
    """Return a line for every answer of a snapshot that is not whole, and every text that is not plain decoding's."""
    whole = _whole_snapshots(settings, {reply.snapshot_id for _, reply in evidence.replies} - {BASE})
    lines = []
    for prompt, reply in evidence.replies:
        if reply.text != evidence.plain[prompt]:
            lines.append(f"{reply.request_id} of snapshot {reply.snapshot_id}: not plain decoding's text")
        elif not whole.get(reply.snapshot_id, reply.snapshot_id == BASE):
            lines.append(f"{reply.request_id}: snapshot {reply.snapshot_id} is not in the registry, or not whole")
    wrong = [prompt for prompt, begun in evidence.beginnings if not evidence.plain[prompt].startswith(begun)]
    return lines + [f"a stream that broke off did not begin as {PROMPTS[prompt]!r} does" for prompt in wrong]


def _whole_snapshots(settings: Settings, served: Set[str]) -> dict[str, bool]:
    """Return for each served snapshot in the registry whether its files have its manifest's checksums."""
    registry, whole = assembly.registry(settings), {}
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
