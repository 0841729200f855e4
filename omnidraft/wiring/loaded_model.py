"""Decoding with a model that the caller has loaded with transformers."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnidraft.config import Settings
from omnidraft.errors import RequestError
from omnidraft.ports import Metrics
from omnidraft.wiring.costs import measured_costs
from omnidraft.wiring.drafter_prompt import drafter_prompt
from omnidraft.wiring.drafting import drafter_memory
from omnidraft.wiring.memory import memory_loader
from omnidraft.wiring.named_snapshots import named_or_base, require_named
from omnidraft.wiring.snapshot_loading import snapshot_loader
from omnidraft.wiring.vocabularies import TargetVocabulary, Vocabularies

if TYPE_CHECKING:
    from omnidraft.decode.decoder import Decoder
    from omnidraft.decode.drafting.session_pool import DrafterMemory
    from omnidraft.memory.recent_texts import RecentTexts
    from omnidraft.models.hf.tokenizer import HfTokenizer
    from omnidraft.ports import Proposer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder over the caller's model, and what drafts for it."""

    decoder: "Decoder"
    proposer: "Proposer"
    recent: "RecentTexts"
    """What was generated lately, for the suffix memory."""
    drafter_memory: "DrafterMemory"
    """The drafter's keys, those of earlier texts too."""
    tokenizers: TargetVocabulary
    settings: Settings

    def drafter_prompt(self, prompt_ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the drafter's ids of a prompt, and the target's ids that it reads after them; see drafter_prompt.py.
        Neither without a drafter."""
        if not isinstance(self.tokenizers, Vocabularies):
            return (), ()
        from omnidraft.wiring.vllm import drafter_of

        return drafter_prompt(prompt_ids, self.tokenizers, drafter_of(self.proposer).model.context_limit)

    def batch_decoder(self, max_ids: Sequence[int]) -> "Decoder":
        """Return the decoder for a batch of texts of at most so many ids each, none of which waits for others to end.
        Raises RequestError where there is no memory for that."""
        from omnidraft.decode.scheduler import Scheduler

        decoder, settings, mode = copy.copy(self.decoder), self.settings.scheduler, self.settings.decode.mode
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
    from omnidraft.decode.decoder import Decoder
    from omnidraft.decode.drafting.safe_drafting import DraftingFailures
    from omnidraft.memory.recent_texts import RecentTexts
    from omnidraft.models.hf.target import TransformersTarget
    from omnidraft.models.hf.tokenizer import loaded_tokenizer

    require_named(settings, snapshot)
    name = f"{settings.models.target}-{model.num_parameters()}"
    target = TransformersTarget(model, name=name, precision=f"{model.dtype}-{model.device.type}")
    tokenizers = _tokenizers(settings, loaded_tokenizer(tokenizer, model.config.get_text_config().vocab_size))
    costs = measured_costs(settings, target)
    recent = RecentTexts() if settings.decode.suffix_memory else RecentTexts(0)
    memories, keys = memory_loader(settings, metrics), drafter_memory()
    load = snapshot_loader(settings, tokenizers, costs, recent=recent, memories=memories, drafter_memory=keys)
    drafting = named_or_base(settings, load, snapshot)
    decoder = Decoder(
        target,
        tokenizers.target.vocabulary,
        costs=costs,
        failures=DraftingFailures(metrics, settings.models.target),
        scheduling=settings.scheduler,
    )
    return LoadedModel(decoder, drafting.proposer, recent, keys, tokenizers, settings)


def _tokenizers(settings: Settings, target: "HfTokenizer") -> TargetVocabulary:
    """Return the tokenizers of the caller's target and of the drafter, if there is one."""
    from omnidraft.models.catalog import store
    from omnidraft.models.hf.tokenizer import load_tokenizer
    from omnidraft.vocab.alignment import align_cached

    nowhere = Path()  # the target is loaded
    if not settings.models.has_drafter:
        return TargetVocabulary(nowhere, target)
    folder, home = store.resolve(settings.models.drafter), store.default_home()
    drafter = load_tokenizer(folder, home / "tokenizers")
    alignment = align_cached(drafter, target, home / "alignments")
    return Vocabularies(nowhere, target, drafter_folder=folder, drafter=drafter, alignment=alignment)
