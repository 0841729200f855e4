"""The proposer for another engine: round scheduler, trace producer and snapshot updater."""

import os
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from omnidraft.assembly.drafting import SharedDrafting, drafter_memory, drafter_of, drafter_prompt, policy
from omnidraft.assembly.host import snapshot_updater
from omnidraft.assembly.models import Vocabularies, vocabularies
from omnidraft.assembly.recording import trace_producer
from omnidraft.assembly.registries import require_named, snapshot_reader
from omnidraft.assembly.snapshot_loading import named_or_base, snapshot_loader
from omnidraft.config import Settings
from omnidraft.decode.drafting.safe_drafting import DraftingFailures, SafeSession
from omnidraft.decode.external.request_options import RequestOptions
from omnidraft.decode.external.round_scheduler import RoundScheduler
from omnidraft.decode.external.sequence_tracker import ExternalSequence, SequenceTracker, TokenBuffer
from omnidraft.decode.policy.cost_model import StepCosts, guessed_passes
from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.decode.snapshot.updater import SnapshotUpdater
from omnidraft.ports import Metrics, Request


@dataclass(frozen=True, slots=True)
class Batching:
    """The parts of the proposer. Without a producer no traces are recorded; without an updater the snapshot stays."""

    rounds: RoundScheduler
    producer: TraceProducer | None
    updater: SnapshotUpdater | None
    slot: SnapshotSlot


def batching(settings: Settings, metrics: Metrics, *, num_tokens: int, has_tenants: bool = False) -> Batching:
    """Return a proposer of at most `num_tokens` tokens for `models.target`, which another engine runs.

    Args:
        has_tenants: whether requests may name their tenant; else all are of `worker.tenant`.

    Raises:
        BusError, RegistryError: log or registry cannot be reached at the start; later they may come and go.
        ConfigError: there is no such redactor.
        ModelError, SnapshotError, VocabularyError: models or snapshot cannot be loaded, or do not belong together.
    """
    pinned = settings.worker.snapshot
    require_named(settings, pinned)
    is_recorded = has_tenants or settings.worker.tenant not in settings.recorder.opted_out
    producer = trace_producer(settings, metrics) if is_recorded else None
    tokenizers = vocabularies(settings)
    step_s, passes, memory = StepCosts(), guessed_passes(), drafter_memory()

    def num_draft_tokens(tenant: str | None) -> int:
        return slot.rules.limit(tenant or settings.worker.tenant, "text", num_tokens)

    chains = cache(lambda: policy(settings.decode, lambda: passes, lambda: step_s.curve, num_candidates=1))
    shared = SharedDrafting(lambda mode: chains(), step_s, memory)
    load = snapshot_loader(settings, tokenizers, shared, is_external=True)
    slot = SnapshotSlot(named_or_base(settings, load, pinned))
    failures = DraftingFailures(metrics, settings.models.target)
    rounds = RoundScheduler(
        SequenceOpener(settings, tokenizers, slot, producer, failures).open,
        SequenceTracker(),
        partial(step_s.observe_pass, passes),
        memory,
        metrics,
        target=settings.models.target,
        stop_ids=tokenizers.target.stop_ids,
        top_k=settings.recorder.top_k,
        num_tokens=num_draft_tokens,
        failures=failures,
    )
    updater = None
    if pinned is None:
        reader = snapshot_reader(settings)
        updater = snapshot_updater(settings, metrics, reader, slot, load, rounds.forget_texts)
    return Batching(rounds, producer, updater, slot)


class SequenceOpener:
    """Opens the sequences of a slot's snapshots. It makes up request ids, since the engine passes none."""

    def __init__(
        self,
        settings: Settings,
        tokenizers: Vocabularies,
        slot: SnapshotSlot,
        producer: TraceProducer | None,
        failures: DraftingFailures,
    ) -> None:
        self._settings, self._tokenizers = settings, tokenizers
        self._slot, self._producer, self._failures = slot, producer, failures
        self._worker = f"{socket.gethostname()}-{os.getpid()}"

    def open(self, prompt_ids: np.ndarray, options: RequestOptions) -> ExternalSequence:
        """See round_scheduler.OpenSequence. The request id decides whether the canary serves it."""
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
            SafeSession(snapshot.proposer, request, len(self._tokenizers.target.vocabulary), self._failures),
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

    def _builder(self, request_id: str, request: Request, snapshot: LoadedSnapshot) -> TraceRecordBuilder:
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
