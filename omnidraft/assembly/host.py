"""What decodes one target, in every process that does: the model, all that drafts for it, an engine over both, and what
keeps the snapshot up to date."""

import copy
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omnidraft.assembly.drafting import drafter_memory, drafter_of, drafter_prompt, measured_costs, shared_drafting
from omnidraft.assembly.fleet import control_log
from omnidraft.assembly.models import TargetVocabulary, Vocabularies, aligned, identity, target
from omnidraft.assembly.registries import require_named
from omnidraft.assembly.signing import follows_registry
from omnidraft.assembly.snapshot_loading import (
    SnapshotLoader,
    champion_or_base,
    memory_loader,
    named_or_base,
    snapshot_loader,
)
from omnidraft.config import NO_DRAFTER, Settings
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.safe_drafting import DraftingFailures
from omnidraft.decode.engine import Engine
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.decode.prompting import Pair
from omnidraft.decode.receipt import ModelIdentity
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.decode.sampling.grammar import Grammars
from omnidraft.decode.sampling.grammar_trial import GrammarTrial
from omnidraft.decode.scheduler import Scheduler
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.decode.snapshot.tenant_rules import TenantRules
from omnidraft.decode.snapshot.updater import SnapshotUpdater
from omnidraft.errors import RequestError
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.models.loading import SharedDrafter, in_background_thread
from omnidraft.ports import Metrics, Proposer, SnapshotReader, Target, Tracing
from omnidraft.progress import stages
from omnidraft.registry.staging import own_folder, remove_abandoned
from omnidraft.tools.formats import FORMATS


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """One target with its alignment, cache and snapshot slot. Without an updater its snapshot stays."""

    engine: Engine
    target: Target
    identity: ModelIdentity
    updater: SnapshotUpdater | None


class DecodingHost:
    """A loaded target, and all that drafts for it and outlives its snapshots."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        tokenizers: TargetVocabulary,
        *,
        loaded_target: Target | None = None,
        base: SharedDrafter | None = None,
        costs: MeasuredCosts | None = None,
        producer: TraceProducer | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Load what decodes `models.target`.

        Args:
            loaded_target: the target, where it is loaded already.
            base: the base drafter shared with other hosts; None: this host has its own.
            costs: those of the target, where they are known already.
            producer: records traces; None records none.
        """
        self.settings, self.tokenizers = settings, tokenizers
        self._metrics, self._producer, self._tracing = metrics, producer, tracing
        self.target = target(settings, tokenizers) if loaded_target is None else loaded_target
        self.costs = measured_costs(settings, self.target) if costs is None else costs
        self.recent = RecentTexts() if settings.decode.suffix_memory else RecentTexts(0)
        self.drafter_memory = drafter_memory()
        self._rules = TenantRules()
        shared = shared_drafting(
            settings.decode, self.costs, self.recent, self.drafter_memory, has_drafter=settings.models.has_drafter
        )
        memories = memory_loader(settings, metrics, self._rules)
        self.load = snapshot_loader(settings, tokenizers, shared, base, memories, self._rules)

    def serve(self, snapshots: SnapshotReader, *, begins_with_champion: bool = False) -> ServedTarget:
        """Return the target with an engine that follows the champion, unless `worker.snapshot` names a snapshot. It
        begins with the base drafter, or with the champion, which takes longer."""
        settings, pinned = self.settings, self.settings.worker.snapshot
        self.costs.passes(settings.decode.mode)  # whatever the policy: metrics compare with plain decoding
        load = self.load
        first = champion_or_base(settings, load) if begins_with_champion else named_or_base(settings, load, pinned)
        engine = self.engine(first)
        stages.info("preparing grammars and chats")
        engine.decoder.grammars.prepare()
        self.tokenizers.target.prepare_chats()
        if pinned is not None:
            return ServedTarget(engine, self.target, self.identity, None)

        updater = snapshot_updater(
            settings, self._metrics, snapshots, engine.slot, load, engine.forget_texts, tracing=self._tracing
        )
        return ServedTarget(engine, self.target, self.identity, updater)

    @property
    def identity(self) -> ModelIdentity:
        """What receipts say of the target."""
        return identity(self.settings, self.tokenizers, self.target)

    def engine(self, first: LoadedSnapshot) -> Engine:
        """Return an engine whose slot begins with this snapshot."""
        settings, drafting = self.settings, self.tokenizers if isinstance(self.tokenizers, Vocabularies) else None
        tokenizer = self.tokenizers.target
        named = settings.models.tool_formats.get(settings.models.target)
        pair = Pair(
            settings.models.target,
            settings.models.drafter,
            f"{socket.gethostname()}-{os.getpid()}",
            drafting.alignment.fingerprint if drafting else NO_DRAFTER,
            tokenizer,
            drafting.drafter if drafting else None,
            tokenizer.tool_format if named is None else FORMATS[named],
        )
        return Engine(
            self.decoder(Grammars(tokenizer.vocabulary, GrammarTrial(tokenizer.vocabulary))),
            pair,
            SnapshotSlot(first, self._rules),
            self._producer,
            self._metrics,
            decode=settings.decode,
            opted_out=settings.recorder.opted_out,
            tracing=self._tracing,
            recent=self.recent if settings.decode.suffix_memory else None,
            drafter_memory=self.drafter_memory,
        )

    def decoder(self, grammars: Grammars | None = None) -> Decoder:
        """Return a decoder of the target; without `grammars` its requests are trusted."""
        settings = self.settings
        return Decoder(
            self.target,
            self.tokenizers.target.vocabulary,
            trace_top_k=settings.recorder.top_k if self._producer else None,
            costs=self.costs,
            failures=DraftingFailures(self._metrics, settings.models.target),
            grammars=grammars,
            scheduling=settings.scheduler,
        )


def snapshot_updater(
    settings: Settings,
    metrics: Metrics,
    snapshots: SnapshotReader,
    slot: SnapshotSlot,
    load: SnapshotLoader,
    forget: Callable[[], None],
    *,
    tracing: Tracing | None = None,
) -> SnapshotUpdater:
    """Return what keeps a slot at the fleet's champion and canary.

    Args:
        forget: called after an order to forget a tenant; drops what this process keeps of earlier texts.
    """

    def forget_all() -> None:
        forget()
        remove_abandoned()

    return SnapshotUpdater(
        snapshots,
        slot,
        partial(in_background_thread, load),
        control_log(settings, metrics),
        settings.worker,
        metrics,
        target=settings.models.target,
        staging=own_folder(),
        tracing=tracing,
        forget=forget_all,
        follows_registry=follows_registry(settings),
    )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder over the caller's model, and what drafts for it."""

    host: DecodingHost
    decoder: Decoder
    proposer: Proposer

    def drafter_prompt(self, prompt_ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the drafter's ids of a prompt, and the target's ids that it reads after them. Neither without
        a drafter."""
        tokenizers = self.host.tokenizers
        if not isinstance(tokenizers, Vocabularies):
            return (), ()
        return drafter_prompt(prompt_ids, tokenizers, drafter_of(self.proposer).model.context_limit)

    def batch_decoder(self, max_ids: Sequence[int]) -> Decoder:
        """Return the decoder for a batch of texts of at most so many ids each, none of which waits for others to end.
        Raises RequestError where there is no memory for that."""
        decoder, settings, mode = copy.copy(self.decoder), self.host.settings.scheduler, self.host.settings.decode.mode
        target, num_nodes = decoder.target, 1 + self.decoder.target.limits(mode).num_nodes
        kv_gib = sum(target.kv_bytes(num_ids + num_nodes, mode) for num_ids in max_ids) / 2**30
        if kv_gib > settings.kv_cache_gib:
            raise RequestError(
                f"the keys of {len(max_ids)} rows may take {kv_gib:.3g} GiB, and some might wait until max_time is up; "
                "raise scheduler.kv_cache_gib, or generate fewer rows or new tokens"
            )
        decoder.scheduler = Scheduler(target, settings.model_copy(update={"max_num_seqs": len(max_ids)}))
        return decoder


def loaded_model(
    model: Any, tokenizer: Any, settings: Settings, metrics: Metrics, *, snapshot: str | None = None
) -> LoadedModel:
    """Return a decoder over this model, which shares its weights; the model is lent for this call.

    Args:
        model: a PreTrainedModel of transformers.
        tokenizer: its PreTrainedTokenizer.
        snapshot: a folder, a version or an alias; None is the base drafter.

    Raises:
        ModelError, SnapshotError, VocabularyError: models or snapshot cannot be loaded, or do not belong together.
    """
    from omnidraft.models.hf.target import transformers_target
    from omnidraft.models.hf.tokenizer import loaded_tokenizer

    require_named(settings, snapshot)
    name = f"{settings.models.target}-{model.num_parameters()}"
    target = transformers_target(model, name=name, precision=f"{model.dtype}-{model.device.type}")
    own = loaded_tokenizer(tokenizer, model.config.get_text_config().vocab_size)
    nowhere = Path()  # the target is loaded
    tokenizers = aligned(settings, nowhere, own) if settings.models.has_drafter else TargetVocabulary(nowhere, own)
    host = DecodingHost(settings, metrics, tokenizers, loaded_target=target)
    return LoadedModel(host, host.decoder(), named_or_base(settings, host.load, snapshot).proposer)
