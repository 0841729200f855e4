"""The proposer for another engine: round scheduler, trace producer and snapshot updater."""

import os
import socket
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.errors import ConfigError, ContractError, VocabularyError
from omnidraft.ports import DraftModel, Metrics, Proposer, Request
from omnidraft.wiring.controller import control_follower
from omnidraft.wiring.logs import registry
from omnidraft.wiring.models import SnapshotLoader, Vocabularies, named_snapshot, snapshot_loader_with, vocabularies
from omnidraft.wiring.recording import trace_producer

if TYPE_CHECKING:
    import numpy as np

    from omnidraft.decode.drafting.drafter import Drafter
    from omnidraft.decode.external.batch_policy import BatchPolicy, Seconds
    from omnidraft.decode.external.round_scheduler import RoundScheduler
    from omnidraft.decode.external.sequence_tracker import ExternalSequence
    from omnidraft.decode.policy.cost_model import CostCurve
    from omnidraft.decode.recording.record_builder import TraceRecordBuilder
    from omnidraft.decode.recording.trace_producer import TraceProducer
    from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
    from omnidraft.decode.snapshot.updater import DriftThrottle, SnapshotUpdater
    from omnidraft.vocab.ngram_cache import NgramCache

_LONGEST_PROMPT_SHARE = 0.75
"""The share of the drafter's context that a prompt may fill; the rest is for the answer."""


@dataclass(frozen=True, slots=True)
class Batching:
    """The parts of the proposer. Without a producer no traces are recorded; without an updater the snapshot stays."""

    rounds: "RoundScheduler"
    producer: "TraceProducer | None"
    updater: "SnapshotUpdater | None"
    slot: "SnapshotSlot"


def batching(settings: Settings, metrics: Metrics, *, num_tokens: int) -> Batching:
    """Return a proposer of at most `num_tokens` tokens for `models.target`, which another engine runs.

    Raises:
        BusError, RegistryError: log or registry cannot be reached at the start; later they may come and go.
        ConfigError: there is no such redactor, or the policy is not for batches.
        ModelError, SnapshotError, VocabularyError: models or snapshot cannot be loaded, or do not belong together.
    """
    from omnidraft.decode.drafting.safe_drafting import DraftingFailures
    from omnidraft.decode.external.round_scheduler import RoundLimits, RoundScheduler
    from omnidraft.decode.external.sequence_tracker import SequenceTracker
    from omnidraft.decode.external.step_time_model import StepTimeModel
    from omnidraft.decode.snapshot.slot import SnapshotSlot
    from omnidraft.decode.snapshot.updater import DriftThrottle

    is_recorded = settings.worker.tenant not in settings.recorder.opted_out
    producer = trace_producer(settings, metrics) if is_recorded else None
    tokenizers, section = vocabularies(settings), settings.vllm
    load = snapshot_loader_with(
        settings, tokenizers, lambda model, ngrams: _proposer(settings, tokenizers, model, ngrams)
    )
    pinned = settings.worker.snapshot
    slot = SnapshotSlot(load(None, None) if pinned is None else named_snapshot(settings, load, pinned))
    passes, step_s = StepTimeModel(), _step_costs(slot.current)
    throttle = DriftThrottle(settings.decode.drifted_draft_tokens)
    scheduler = RoundScheduler(
        SequenceOpener(settings, tokenizers, slot, producer),
        SequenceTracker["ExternalSequence"](keep_s=section.keep_left_s, max_inactive=section.most_left),
        _policy(settings, passes, step_s),
        passes,
        step_s,
        metrics,
        target=settings.models.target,
        stop_ids=tokenizers.target.stop_ids,
        top_k=settings.recorder.top_k,
        limits=RoundLimits(
            lambda: throttle.limit(settings.worker.tenant, num_tokens),
            section.drafter_ids,
            section.trace_rows,
            section.idle_s,
        ),
        failures=DraftingFailures(metrics, settings.models.target),
    )
    updater = None if pinned is not None else _updater(settings, metrics, slot, throttle, load)
    return Batching(scheduler, producer, updater, slot)


def _proposer(settings: Settings, tokenizers: Vocabularies, model: DraftModel, ngrams: "NgramCache") -> Proposer:
    """Return a proposer with the drafter and prompt lookup. The drafter uses no noise, since the engine's is
    unknown."""
    from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
    from omnidraft.decode.drafting.drafter import Drafter
    from omnidraft.decode.drafting.prompt_lookup import PromptLookup
    from omnidraft.decode.drafting.tree_proposer import TreeProposer
    from omnidraft.decode.policy.chain import FixedPolicy

    drafter = Drafter(
        model, tokenizers.drafter, tokenizers.target.vocabulary, tokenizers.alignment, ngrams, NoiseCoupling((0.0,))
    )
    sources = (PromptLookup(), drafter) if settings.decode.lookup else (drafter,)
    return TreeProposer(sources, lambda mode, tenant: FixedPolicy())


def _step_costs(snapshot: "LoadedSnapshot") -> "CostCurve":
    from omnidraft.decode.policy.cost_model import measure_steps

    return measure_steps(drafter_of(snapshot.proposer).model)


def drafter_of(proposer: Proposer) -> "Drafter":
    """Return the drafter among the sources of a snapshot's proposer."""
    from omnidraft.decode.drafting.drafter import Drafter
    from omnidraft.decode.drafting.tree_proposer import TreeProposer

    if isinstance(proposer, TreeProposer):
        for each in proposer.sources:
            if isinstance(each, Drafter):
                return each
    raise ContractError(f"a snapshot for batches has a drafter, got {proposer}")


def _policy(settings: Settings, pass_s: "Seconds", step_s: "Seconds") -> "BatchPolicy":
    from omnidraft.decode.external.batch_policy import CostBatchPolicy, FixedBatchPolicy, ThresholdBatchPolicy

    match settings.decode.policy:
        case "fixed":
            return FixedBatchPolicy()
        case "threshold":
            return ThresholdBatchPolicy(settings.decode.min_path_probability)
        case "cost":
            return CostBatchPolicy(pass_s, step_s)
        case other:
            raise ConfigError(f"decode.policy = {other!r} is not for batches: use cost, threshold or fixed")


def _updater(
    settings: Settings, metrics: Metrics, slot: "SnapshotSlot", throttle: "DriftThrottle", load: SnapshotLoader
) -> "SnapshotUpdater":
    from omnidraft.decode.snapshot.updater import SnapshotUpdater
    from omnidraft.models.loading import in_background_thread

    return SnapshotUpdater(
        registry(settings),
        slot,
        partial(in_background_thread, load),
        control_follower(settings, metrics, ("champion", "canary", "drift", "drift_over")),
        throttle,
        settings.worker,
        metrics,
        target=settings.models.target,
        staging=Path(tempfile.mkdtemp(prefix="omnidraft-snapshots-")),
    )


class SequenceOpener:
    """Implements round_scheduler.SequenceFactory. It makes up request ids, since the engine passes none."""

    def __init__(
        self, settings: Settings, tokenizers: Vocabularies, slot: "SnapshotSlot", producer: "TraceProducer | None"
    ) -> None:
        self._settings = settings
        self._tokenizers = tokenizers
        self._slot = slot
        self._producer = producer
        self._worker = f"{socket.gethostname()}-{os.getpid()}"

    def open(self, prompt_ids: "np.ndarray") -> "ExternalSequence":
        """See round_scheduler.SequenceFactory. The request id decides whether the canary serves it."""
        from omnidraft.decode.drafting.tree_proposer import TreeProposer
        from omnidraft.decode.external.batch_drafting import DraftingState
        from omnidraft.decode.external.sequence_tracker import ExternalSequence, TokenBuffer

        request_id = uuid.uuid4().hex
        snapshot = self._slot.snapshot_for(request_id)
        drafter, ids = drafter_of(snapshot.proposer), prompt_ids.tolist()
        assert isinstance(snapshot.proposer, TreeProposer)
        drafter_ids, rest_ids = self._drafter_prompt(ids, drafter.model.context_limit)
        table, with_lookup = snapshot.proposer.calibrator, self._settings.decode.lookup
        drafted = DraftingState(drafter, self._request(ids, drafter_ids), rest_ids, table, with_lookup=with_lookup)
        builder = None
        if self._producer is not None:
            builder = self._builder(request_id, self._request(ids, drafted.context.ids or drafter_ids), snapshot)
        return ExternalSequence(TokenBuffer(prompt_ids), snapshot, drafted, builder, len(ids))

    def _drafter_prompt(self, prompt_ids: Sequence[int], context_limit: int) -> tuple[list[int], list[int]]:
        from omnidraft.decode.external.prompt_mapping import map_prompt

        tokenizers, longest = self._tokenizers, int(context_limit * _LONGEST_PROMPT_SHARE)
        vocabulary = tokenizers.target.vocabulary
        try:
            prompt = map_prompt(prompt_ids, vocabulary, tokenizers.drafter, tokenizers.alignment, longest=longest)
        except VocabularyError:  # some byte that the drafter cannot spell: it sees the answer only
            return [], []
        return prompt.ids, prompt.rest

    def _request(self, prompt_ids: Sequence[int], drafter_ids: Sequence[int]) -> Request:
        stop_ids = self._tokenizers.target.stop_ids
        return Request(tuple(prompt_ids), tuple(drafter_ids), max_new_tokens=1, stop_ids=stop_ids, mode="fast")

    def _builder(self, request_id: str, request: Request, snapshot: "LoadedSnapshot") -> "TraceRecordBuilder":
        from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder

        assert self._producer is not None
        settings, models = self._settings, self._settings.models
        context = RecordContext(
            request_id,
            settings.worker.tenant,
            self._worker,
            models.target,
            models.drafter,
            snapshot.version,
            self._tokenizers.alignment.fingerprint,
            has_settings=False,
        )
        return TraceRecordBuilder(request, context, settings.recorder, self._producer.emit)
