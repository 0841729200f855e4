"""The controller of a fleet, its control log, the fleet's status, and the audit of its log."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout
from torch import Tensor

from omnidraft.assembly.logs import (
    existing_log_reader,
    log_reader,
    log_writer,
    require_log,
    topic_names,
    trace_source,
)
from omnidraft.assembly.models import Vocabularies
from omnidraft.assembly.registries import existing_registry, registry
from omnidraft.assembly.signing import control_signing, require_signer, restate_s, snapshot_signing
from omnidraft.audit.findings import Report
from omnidraft.audit.log_replay import DeadLetterReasons
from omnidraft.audit.run import DiscardingWriter, dead_letter_reasons
from omnidraft.audit.run import audit as run
from omnidraft.config import Settings
from omnidraft.distill.evaluation.snapshot_comparison import SnapshotComparison
from omnidraft.distill.forgetting import RecordRetention
from omnidraft.distill.ingest import dead_letters
from omnidraft.distill.ingest.batcher import seen_keys
from omnidraft.distill.ingest.ingest import require_same_log
from omnidraft.distill.ingest.topic_scan import DRIFT_RECORDS, RecentRecords, idle_timeout_s
from omnidraft.distill.ingest.trace_consumer import TraceConsumer
from omnidraft.distill.publisher import BATCHER
from omnidraft.distill.training.learner import Learner
from omnidraft.errors import LeaseLost, SnapshotNotFound
from omnidraft.fleet import orders
from omnidraft.fleet.control_log import ControlLog
from omnidraft.fleet.controller import Controller
from omnidraft.fleet.lease import ControllerLease
from omnidraft.fleet.request_stats import RequestStatsReader
from omnidraft.ports import Champion, LogReader, Metrics, Registry, SnapshotVersion
from omnidraft.registry.manifest_export import pair_name
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics, LabelledMetrics
from omnidraft.threads import attentive

if TYPE_CHECKING:
    from omnidraft.fleet.overview import Overview

ANSWER_S = 10.0
"""How long a command waits for a controller to carry out its order; one that runs needs a second."""


def control_log(
    settings: Settings, metrics: Metrics, *, is_keeper: bool = False, hears_workers: bool = False
) -> ControlLog:
    """Return the control log of `models.target` and its drafter, signed and verified if keys are set. It is opened when
    it is first needed.

    Args:
        is_keeper, hears_workers: see ControlLog.
    """
    topic, models = settings.log.control_topic, settings.models
    return ControlLog(
        partial(log_reader, settings, topic),
        partial(log_writer, settings, topic),
        LabelledMetrics(metrics, target=models.target),
        target=models.target,
        drafter=models.followed_drafter,
        signing=control_signing(settings),
        is_keeper=is_keeper,
        hears_workers=hears_workers,
    )


def ordering_log(settings: Settings) -> ControlLog:
    """Return the control log for an order, which nobody would follow where no service has begun a log.

    Raises:
        RequestError: there is no log, or none of the fleet's topics is in it.
        BusError: the log cannot be reached.
    """
    require_log(settings)
    return control_log(settings, CountingMetrics())


def controller(settings: Settings, metrics: Metrics) -> Controller:
    """Return the controller of `models.target` and its drafter. Raises BusError, RegistryError; ConfigError when
    values have to be signed and it has no key for that."""
    require_signer(settings, ("controller", "operator"))
    metrics, models = LabelledMetrics(metrics, target=settings.models.target), settings.models
    snapshots = attentive(registry(settings), lambda: made.meanwhile())
    control = ControllerLease(
        control_log(settings, metrics, is_keeper=True), lock=_controller_lock(settings), restate_s=restate_s(settings)
    )
    reader = log_reader(settings, settings.log.traces_topic)
    traffic = RequestStatsReader(reader, target=models.target, drafter=models.followed_drafter)
    signing = snapshot_signing(settings)
    made = Controller(snapshots, control, traffic, metrics, settings.controller, target=models.target, signing=signing)
    return made


def order_champion(settings: Settings, control: ControlLog, version: int) -> Champion | None:
    """Order that this version serves; see fleet/orders.py. Where the log is a file of this machine and no controller
    runs, this process carries the order out. Raises RegistryError, too: the order is in force, not yet an alias."""

    def carry_out() -> None:
        lock = _controller_lock(settings)
        if lock is None:
            return
        with suppress(Timeout, LeaseLost):  # a controller runs
            with lock.acquire(timeout=0):
                pass
            with closing(controller(settings, CountingMetrics())) as made:
                made.obey()
                made.align()

    return orders.order_champion(control, version, timeout_s=ANSWER_S, carry_out=carry_out)


def _controller_lock(settings: Settings) -> FileLock | None:
    """Return the lock of the pair's controller beside a log that is a file of this machine."""
    path, models = settings.log.path, settings.models
    if path is None:
        return None
    name = f".{path.name}.{pair_name(models.followed_drafter, models.target)}.controller"
    return FileLock(path.with_name(name), thread_local=False)  # a thread takes it, and another may close


def snapshot_comparison(
    settings: Settings,
    snapshots: Registry,
    control: ControlLog,
    tokenizers: Vocabularies,
    learner: Learner,
    folder: Path,
) -> SnapshotComparison:
    """Return the comparison of the snapshots of `models.target` on a tenant's newest records."""
    recent = recent_records(settings, tokenizers.alignment.fingerprint)
    base = partial(base_weights, settings, tokenizers)
    return SnapshotComparison(snapshots, learner, recent, control, base, folder / "earlier")


def base_weights(settings: Settings, tokenizers: Vocabularies) -> Mapping[str, Tensor]:
    """Return the weights of the base drafter that are learned, as the settings train it, in float32."""
    from omnidraft.distill.training.learner import SEED
    from omnidraft.models.hf.trainable_drafter import load_trainable

    section = settings.learner
    made = load_trainable(tokenizers.drafter_folder, train=section.train, rank=section.lora_rank, seed=SEED)
    return made.trained()


def recent_records(settings: Settings, alignment: str) -> RecentRecords:
    """Return what reads this pair's newest records from the log, wherever the learner stands."""

    def source_over(reader: LogReader) -> TraceConsumer:
        return trace_source(settings, alignment, reader, DiscardingWriter(), CountingMetrics())

    reader_of_traces = partial(log_reader, settings, settings.log.traces_topic)
    idle_s = idle_timeout_s(settings.log.request_timeout_s)
    return RecentRecords(reader_of_traces, source_over, DRIFT_RECORDS, idle_s=idle_s)


def overview(settings: Settings, workers: Sequence[str] = ()) -> "Overview":
    """Return the status of all targets and workers; services that do not answer are among its problems.

    Args:
        workers: their URLs; empty means those that announced themselves, or else the one that the settings describe.
    """
    from omnidraft.fleet.overview import OverviewSources
    from omnidraft.fleet.overview import overview as gather
    from omnidraft.fleet.workers import worker_status

    sources = OverviewSources(
        registry=lambda target: existing_registry(settings.for_target(target)),
        topics=lambda: topic_names(settings),
        reader=lambda topic: log_reader(settings, topic),
        worker=partial(worker_status, metrics_key=settings.worker.metrics_key),
        control=lambda target: control_log(settings.for_target(target), CountingMetrics(), hears_workers=True),
    )
    now_ms = time.time_ns() // 1_000_000
    return gather(sources, settings, workers, now_ms, guess=worker_url(settings))


def worker_url(settings: Settings) -> str:
    """Return the URL of the worker of these settings, seen from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.worker.host, settings.worker.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.worker.port}"


def audit(
    settings: Settings, *, counts_only: bool = False, on_poll: Callable[[int], None] = lambda num_messages: None
) -> Report:
    """Compare the log with the offsets and counts of the snapshots of `models.target`. Learning may continue meanwhile.

    Args:
        counts_only: skip the record names that the newest snapshot stores, which come with its optimizer.
        on_poll: called with the number of messages of each poll.

    Raises:
        BusError, SnapshotError: log or registry cannot be read.
        RequestError: there is no trace topic.
        LogReplaced: it is not the log that the newest snapshot learned from.
    """
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
        never_seen = _never_seen(settings, versions)
        source = trace_source(
            settings, alignment, reader, DiscardingWriter(), CountingMetrics(), never_seen.is_forgotten
        )
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


def _never_seen(settings: Settings, versions: Sequence[SnapshotVersion]) -> RecordRetention:
    """Return what tells the records of tenants whom the weights of the newest snapshot forgot, so that none of its
    ancestors learned them."""
    retention = RecordRetention()
    if not versions or settings.log.control_topic not in topic_names(settings):
        return retention
    with closing(control_log(settings, CountingMetrics())) as control:
        for tenant, order in control.read_whole().forgets.items():
            if (exact := order.exact) and exact.id in versions[-1].manifest.forgets:
                retention.forget(tenant, exact.until_ms)
    return retention


def _dead_letter_reasons(settings: Settings) -> DeadLetterReasons:
    """Return the reasons of all dead letters of traces; none where there is no topic of dead letters."""
    log = settings.log
    if log.dead_letters_topic not in topic_names(settings):
        return {}
    with closing(log_reader(settings, log.dead_letters_topic)) as reader:
        found = dead_letters.read(reader, idle_s=idle_timeout_s(log.request_timeout_s))
        return dead_letter_reasons(log.traces_topic, found)


def _seen_names(snapshots: Registry, versions: Sequence[SnapshotVersion]) -> frozenset[int] | None:
    """Return the record names in the newest snapshot, or None when it has none."""
    if not versions or BATCHER not in versions[-1].manifest.sha256:
        return None
    with tempfile.TemporaryDirectory(prefix="omnidraft-verify-") as staging:
        try:
            folder = snapshots.fetch(versions[-1].version, Path(staging), ("resume",))
        except SnapshotNotFound:  # newer ones were published meanwhile, and only the newest keep their resume part
            return None
        return seen_keys(bundle.tensors(folder, BATCHER))
