"""The model before its transfer, as the one that teaches: its likelihoods of chunks of bytes and its hidden states.

The two sides of a chunk are computed by one function, each from the whole distribution over its own vocabulary, so that
p and q are equal when the models and tokenizers are; nothing is cut to the likeliest tokens.
Shapes: O ids of the old tokenizer and T of the new one, P points where they meet, N chunks, V the old vocabulary.
Source: docs/algorithms.md, section 14; ALM, https://arxiv.org/abs/2503.20083, section 3.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.examples.buckets import certain_buckets
from omnidraft.distill.examples.chunks import AlmSettings, chunk_spans, chunk_targets, word_starts
from omnidraft.distill.examples.targets import ChunkTargets, HiddenTargets
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.training.alm import log_q
from omnidraft.ports import TrainableDrafter
from omnidraft.transfer.bits_per_byte import hidden_states
from omnidraft.transfer.texts import AlignedText
from omnidraft.vocab.tokenizer import Vocabulary


class OriginalModel:
    """Makes training examples of texts, each with one pass. It has no state but its weights."""

    def __init__(self, model: TrainableDrafter, old: Vocabulary, new: Vocabulary, settings: AlmSettings) -> None:
        """
        Args:
            model: it does not learn here.
        """
        self._model, self._settings = model, settings
        self._starts_old, self._starts_new = word_starts(old), word_starts(new)

    @torch.no_grad()
    def example(self, text: AlignedText) -> TrainingExample:
        """Return what this text teaches: chunks, hidden states, and the next id at each of its ids."""
        hidden_OH = hidden_states(self._model, text.old_ids_O)
        logits_OV = self._model.logits(hidden_OH).float()
        spans_N2 = chunk_spans(text.new_at_P, self._closes(logits_OV, text.old_at_P), np.ones(len(text.new_at_P), bool))
        chunks = self._chunks(text.new_ids_T, text.new_at_P, spans_N2, self._starts_new)
        before = self._chunks(text.old_ids_O, text.old_at_P, spans_N2, self._starts_old)
        log_p_N = log_q(logits_OV, before.tensors()).numpy()
        at_T = np.arange(len(text.new_ids_T) - 1)
        return TrainingExample.of_text(
            text.new_ids_T,
            at_T,
            text.new_ids_T[1:],
            {
                "chunk": replace(chunks, log_p_N=log_p_N),
                "hidden": HiddenTargets(text.new_at_P, hidden_OH[text.old_at_P].float().numpy()),
                "emitted": certain_buckets(at_T, text.new_ids_T[1:]),
            },
        )

    def _closes(self, logits_OV: Tensor, old_at_P: np.ndarray) -> np.ndarray:
        """Return whether a word starts after each point with enough probability for a chunk to end there."""
        if not self._settings.merge_below:
            return np.ones(len(old_at_P), bool)
        at_PV = logits_OV[old_at_P].softmax(dim=-1)
        mass_P = at_PV[:, : len(self._starts_old)][:, torch.from_numpy(self._starts_old)].sum(dim=-1)
        return (mass_P > self._settings.merge_below).numpy()

    def _chunks(
        self, ids_T: np.ndarray, at_P: np.ndarray, spans_N2: np.ndarray, starts_V: np.ndarray
    ) -> ChunkTargets[np.ndarray]:
        """Return the chunks on one side, without likelihoods."""
        return chunk_targets(
            ids_T,
            at_P,
            spans_N2,
            np.zeros(len(spans_N2)),
            tau=self._settings.tau,
            starts_V=starts_V if self._settings.debias else None,
        )
