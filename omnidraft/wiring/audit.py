"""The audit of one pair, with log, dead letters and registry from the settings. No model is needed."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.errors import SnapshotNotFound
from omnidraft.ports import Registry, SnapshotVersion
from omnidraft.wiring.existing import existing_log_reader
from omnidraft.wiring.logs import log_reader, registry, topic_names, trace_source

if TYPE_CHECKING:
    from omnidraft.audit.findings import Report
    from omnidraft.audit.log_replay import DeadLetterReasons


def audit(
    settings: Settings, *, counts_only: bool = False, on_poll: Callable[[int], None] = lambda num_messages: None
) -> "Report":
    """Compare the log with the offsets and counts of the snapshots of `models.target`. Learning may continue meanwhile.

    Args:
        counts_only: skip the record names that the newest snapshot stores, which come with its optimizer.
        on_poll: called with the number of messages of each poll.

    Raises:
        BusError, SnapshotError: log or registry cannot be read.
        RequestError: there is no trace topic.
        LogReplaced: it is not the log that the newest snapshot learned from.
    """
    from omnidraft.audit.run import DiscardingWriter
    from omnidraft.audit.run import audit as run
    from omnidraft.distill.ingest.log_position import require_same_log
    from omnidraft.distill.ingest.topic_scan import idle_timeout_s
    from omnidraft.telemetry.metrics import CountingMetrics

    log = settings.log
    with closing(existing_log_reader(settings, log.traces_topic)) as reader:  # no snapshot was published without it
        snapshots = registry(settings)
        versions = snapshots.versions()  # first: all that they refer to is in the log or dead-lettered by now
        seen = None if counts_only else _seen_names(snapshots, versions)
        dead_letter_index = _dead_letter_reasons(settings)
        if versions:
            manifest = versions[-1].manifest
            require_same_log(manifest.log_id, reader.identity(), manifest.offsets, manifest.offsets)  # ends: as faults
        alignment = versions[-1].manifest.alignment if versions else None
        source = trace_source(settings, alignment, reader, DiscardingWriter(), CountingMetrics())
        held_out_every = settings.learner.held_out_every
        return run(
            source,
            reader.end_offsets(),
            versions,
            dead_letter_index,
            seen_keys=seen,
            held_out_every=held_out_every,
            on_poll=on_poll,
            idle_s=idle_timeout_s(log.request_timeout_s),
        )


def _dead_letter_reasons(settings: Settings) -> "DeadLetterReasons":
    """Return the reasons of all dead letters of traces; none where there is no topic of dead letters."""
    from omnidraft.audit.run import dead_letter_reasons
    from omnidraft.distill.ingest import dead_letters
    from omnidraft.distill.ingest.topic_scan import idle_timeout_s

    log = settings.log
    if log.dead_letters_topic not in topic_names(settings):
        return {}
    with closing(log_reader(settings, log.dead_letters_topic)) as reader:
        found = dead_letters.read(reader, idle_s=idle_timeout_s(log.request_timeout_s))
        return dead_letter_reasons(log.traces_topic, found)


def _seen_names(snapshots: Registry, versions: Sequence[SnapshotVersion]) -> frozenset[int] | None:
    """Return the record names in the newest snapshot, or None when it has none."""
    from omnidraft.distill.ingest.batcher import seen_keys
    from omnidraft.distill.publisher import BATCHER
    from omnidraft.snapshots import bundle

    if not versions or BATCHER not in versions[-1].manifest.sha256:
        return None
    with tempfile.TemporaryDirectory(prefix="omnidraft-verify-") as staging:
        try:
            folder = snapshots.fetch(versions[-1].version, Path(staging), ("resume",))
        except SnapshotNotFound:  # newer ones were published meanwhile, and only the newest keep their resume part
            return None
        return seen_keys(bundle.tensors(folder, BATCHER))
