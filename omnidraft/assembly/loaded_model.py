"""Decoding with a model that the caller has loaded with transformers."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft.assembly.drafting import drafter_of, drafter_prompt
from omnidraft.assembly.host import DecodingHost
from omnidraft.assembly.models import TargetVocabulary, Vocabularies, aligned
from omnidraft.assembly.registries import require_named
from omnidraft.assembly.snapshot_loading import named_or_base
from omnidraft.config import Settings
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.scheduler import Scheduler
from omnidraft.errors import RequestError
from omnidraft.ports import Metrics, Proposer


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
    from omnidraft.models.hf.target import TransformersTarget
    from omnidraft.models.hf.tokenizer import loaded_tokenizer

    require_named(settings, snapshot)
    name = f"{settings.models.target}-{model.num_parameters()}"
    target = TransformersTarget(model, settings.decode, name=name, precision=f"{model.dtype}-{model.device.type}")
    own = loaded_tokenizer(tokenizer, model.config.get_text_config().vocab_size)
    nowhere = Path()  # the target is loaded
    tokenizers = aligned(settings, nowhere, own) if settings.models.has_drafter else TargetVocabulary(nowhere, own)
    host = DecodingHost(settings, metrics, tokenizers, loaded_target=target)
    return LoadedModel(host, host.decoder(), named_or_base(settings, host.load, snapshot).proposer)
