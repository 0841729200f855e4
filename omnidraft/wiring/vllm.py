"""The proposer for another engine: round scheduler, trace producer and snapshot updater."""

import os
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.errors import ContractError
from omnidraft.ports import Announcement, Metrics, Proposer, Request
from omnidraft.wiring.controller import control_follower
from omnidraft.wiring.drafter_prompt import drafter_prompt
from omnidraft.wiring.drafting import SharedDrafting, drafter_memory, policy, proposer
from omnidraft.wiring.logs import snapshot_reader
from omnidraft.wiring.named_snapshots import named_or_base, require_named
from omnidraft.wiring.recording import trace_producer
from omnidraft.wiring.signing import champion_statements
from omnidraft.wiring.snapshot_loading import SnapshotLoader, snapshot_loader_with
from omnidraft.wiring.vocabularies import Vocabularies, vocabularies

if TYPE_CHECKING:
    import numpy as np

    from omnidraft.decode.drafting.drafter import Drafter
    from omnidraft.decode.drafting.safe_drafting import SafeDrafting
    from omnidraft.decode.external.request_options import RequestOptions
    from omnidraft.decode.external.round_scheduler import RoundScheduler
    from omnidraft.decode.external.sequence_tracker import ExternalSequence
    from omnidraft.decode.recording.record_builder import TraceRecordBuilder
    from omnidraft.decode.recording.trace_producer import TraceProducer
    from omnidraft.decode.snapshot.drift_throttle import DriftThrottle
    from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
    from omnidraft.decode.snapshot.updater import SnapshotUpdater


@dataclass(frozen=True, slots=True)
class Batching:
    """The parts of the proposer. Without a producer no traces are recorded; without an updater the snapshot stays."""

    rounds: "RoundScheduler"
    producer: "TraceProducer | None"
    updater: "SnapshotUpdater | None"
    slot: "SnapshotSlot"


def batching(settings: Settings, metrics: Metrics, *, num_tokens: int, has_tenants: bool = False) -> Batching:
    """Return a proposer of at most `num_tokens` tokens for `models.target`, which another engine runs.

    Args:
        has_tenants: whether requests may name their tenant; else all are of `worker.tenant`.

    Raises:
        BusError, RegistryError: log or registry cannot be reached at the start; later they may come and go.
        ConfigError: there is no such redactor.
        ModelError, SnapshotError, VocabularyError: models or snapshot cannot be loaded, or do not belong together.
    """
    from omnidraft.decode.drafting.safe_drafting import DraftingFailures, SafeDrafting
    from omnidraft.decode.external.probing_policy import ProbingPolicy
    from omnidraft.decode.external.round_scheduler import IDLE_S, TRACE_ROWS, RoundLimits, RoundScheduler
    from omnidraft.decode.external.sequence_tracker import KEEP_S, MOST_INACTIVE, SequenceTracker
    from omnidraft.decode.external.step_time_model import StepTimeModel
    from omnidraft.decode.policy.cost_model import StepCosts
    from omnidraft.decode.snapshot.drift_throttle import DriftThrottle
    from omnidraft.decode.snapshot.slot import SnapshotSlot

    pinned = settings.worker.snapshot
    require_named(settings, pinned)
    is_recorded = has_tenants or settings.worker.tenant not in settings.recorder.opted_out
    producer = trace_producer(settings, metrics) if is_recorded else None
    tokenizers = vocabularies(settings)
    throttle, passes = DriftThrottle(), StepTimeModel()
    memory, failures = drafter_memory(), DraftingFailures(metrics, settings.models.target)
    limits = RoundLimits(
        lambda tenant: throttle.limit(tenant or settings.worker.tenant, "text", num_tokens),
        TRACE_ROWS,
        IDLE_S,
    )
    step_s = StepCosts()
    inner = policy(settings.decode, lambda: passes, step_s, num_candidates=1)
    probing = ProbingPolicy(inner, passes, lambda: limits.num_tokens(None))
    shared = SharedDrafting(lambda mode: probing, step_s, memory)
    load = snapshot_loader_with(
        settings,
        tokenizers,
        lambda model, ngrams, memory, factors: proposer(
            settings.decode, tokenizers, shared, model, ngrams, is_external=True
        ),
    )
    slot = SnapshotSlot(named_or_base(settings, load, pinned))
    drafting = SafeDrafting(len(tokenizers.target.vocabulary), failures)
    scheduler = RoundScheduler(
        SequenceOpener(settings, tokenizers, slot, producer, drafting),
        SequenceTracker["ExternalSequence"](keep_s=KEEP_S, max_inactive=MOST_INACTIVE),
        drafting,
        passes,
        memory,
        metrics,
        target=settings.models.target,
        stop_ids=tokenizers.target.stop_ids,
        top_k=settings.recorder.top_k,
        limits=limits,
        failures=failures,
    )
    updater = None if pinned is not None else _updater(settings, metrics, slot, throttle, load, scheduler)
    return Batching(scheduler, producer, updater, slot)


def drafter_of(proposer: Proposer) -> "Drafter":
    """Return the drafter among the sources of a snapshot's proposer."""
    from omnidraft.decode.drafting.drafter import Drafter
    from omnidraft.decode.drafting.tree_proposer import TreeProposer

    if isinstance(proposer, TreeProposer):
        for each in proposer.sources:
            if isinstance(each, Drafter):
                return each
    raise ContractError(f"a snapshot for batches has a drafter, got {proposer}")


def _updater(
    settings: Settings,
    metrics: Metrics,
    slot: "SnapshotSlot",
    throttle: "DriftThrottle",
    load: SnapshotLoader,
    rounds: "RoundScheduler",
) -> "SnapshotUpdater":
    from omnidraft.decode.snapshot.updater import SnapshotUpdater
    from omnidraft.models.loading import in_background_thread
    from omnidraft.registry.staging import own_folder, remove_abandoned

    def forget(order: Announcement) -> None:
        rounds.forget_texts()
        remove_abandoned()

    return SnapshotUpdater(
        snapshot_reader(settings),
        slot,
        partial(in_background_thread, load),
        control_follower(settings, metrics, ("champion", "canary", "drift", "drift_over", "forget")),
        throttle,
        settings.worker,
        metrics,
        target=settings.models.target,
        staging=own_folder(),
        forget=forget,
        statements=champion_statements(settings),
    )


class SequenceOpener:
    """Implements round_scheduler.SequenceFactory. It makes up request ids, since the engine passes none."""

    def __init__(
        self,
        settings: Settings,
        tokenizers: Vocabularies,
        slot: "SnapshotSlot",
        producer: "TraceProducer | None",
        drafting: "SafeDrafting",
    ) -> None:
        self._settings = settings
        self._tokenizers = tokenizers
        self._slot = slot
        self._producer = producer
        self._drafting = drafting
        self._worker = f"{socket.gethostname()}-{os.getpid()}"

    def open(self, prompt_ids: "np.ndarray", options: "RequestOptions") -> "ExternalSequence":
        """See round_scheduler.SequenceFactory. The request id decides whether the canary serves it."""
        from omnidraft.decode.external.sequence_tracker import ExternalSequence, TokenBuffer

        request_id = uuid.uuid4().hex
        snapshot = self._slot.snapshot_for(request_id)
        drafter = drafter_of(snapshot.proposer)
        tenant = options.tenant or self._settings.worker.tenant
        is_stored = options.is_stored and tenant not in self._settings.recorder.opted_out
        request = self._request(prompt_ids.tolist(), drafter.model.context_limit, tenant, is_stored=is_stored)
        builder = None
        if self._producer is not None and is_stored:
            drafter_ids = tuple(drafter.context(request).ids or request.drafter_prompt_ids)
            builder = self._builder(request_id, replace(request, drafter_prompt_ids=drafter_ids), snapshot)
        return ExternalSequence(
            TokenBuffer(prompt_ids),
            snapshot,
            self._drafting.open(snapshot.proposer, request),
            builder,
            options=options,
        )

    def _request(self, prompt_ids: Sequence[int], context_limit: int, tenant: str, *, is_stored: bool) -> Request:
        """Return the sequence as a request of unknown length, in whose prompt text between special tokens is read by
        the drafter like the answer."""
        drafter_ids, rest_ids = drafter_prompt(prompt_ids, self._tokenizers, context_limit)
        return Request(
            tuple(prompt_ids),
            drafter_ids,
            max_new_tokens=sys.maxsize,
            stop_ids=self._tokenizers.target.stop_ids,
            mode="fast",
            tenant=tenant,
            is_stored=is_stored,
            drafter_prompt_tail=rest_ids,
        )

    def _builder(self, request_id: str, request: Request, snapshot: "LoadedSnapshot") -> "TraceRecordBuilder":
        from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder

        assert self._producer is not None
        models = self._settings.models
        context = RecordContext(
            request_id,
            request.tenant,
            self._worker,
            models.target,
            models.drafter,
            snapshot.version,
            self._tokenizers.alignment.fingerprint,
            has_settings=False,
        )
        return TraceRecordBuilder(request, context, self._producer.emit)
