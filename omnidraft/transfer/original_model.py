"""The model before its transfer, as the one that teaches: its likelihoods of chunks of bytes and its hidden states.

The two sides of a chunk are computed by one function, each from the whole distribution over its own vocabulary, so that
p and q are equal when the models and tokenizers are; nothing is cut to the likeliest tokens.
Shapes: O ids of the old tokenizer and T of the new one, P points where they meet, N chunks, V the old vocabulary.
Source: docs/algorithms.md, section 14; ALM, https://arxiv.org/abs/2503.20083, section 3.

Models of different tokenizers are compared by bits per byte: the negative log-likelihood of a text's own tokenisation
over the number of its bytes. Other tokenisations of the same bytes have likelihood too, so it is an upper bound of what
the text costs, for either tokenizer.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from omnidraft.config import AlmSettings
from omnidraft.distill.examples.buckets import certain_buckets
from omnidraft.distill.examples.chunks import chunk_spans, chunk_targets, word_starts
from omnidraft.distill.examples.targets import ChunkTargets, HiddenTargets
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.distill.training.alm import log_q
from omnidraft.ports import PackedTexts, TrainableDrafter
from omnidraft.transfer.texts import AlignedText
from omnidraft.vocab.tokenizer import Vocabulary

_LOGIT_ROWS = 256
"""Rows of logits that exist at a time."""


def bits_per_byte(texts: Iterable[np.ndarray], num_bytes: int) -> float:
    """Return the bits that texts cost, over the number of their bytes.

    Args:
        texts: the negative log-likelihoods of each.
    """
    return math.fsum(nats for nats_T in texts for nats in nats_T) / math.log(2) / num_bytes


@torch.no_grad()
def token_nats(model: TrainableDrafter, ids_T: np.ndarray) -> np.ndarray:
    """Return the negative log-likelihood of each id but the first, float32 [T - 1]."""
    hidden_TH, next_T = hidden_states(model, ids_T)[:-1], torch.from_numpy(ids_T[1:])
    parts = zip(hidden_TH.split(_LOGIT_ROWS), next_T.split(_LOGIT_ROWS), strict=True)
    nats_T: np.ndarray = torch.cat([_nll(model.logits(hidden_NH), next_N) for hidden_NH, next_N in parts]).numpy()
    return nats_T


@torch.no_grad()
def hidden_states(model: TrainableDrafter, ids_T: np.ndarray) -> Tensor:
    """Return the last hidden states [T, H] of one text."""
    num = len(ids_T)
    return model.hidden(
        PackedTexts(torch.from_numpy(ids_T), torch.zeros(num, dtype=torch.int64), torch.arange(num), num_context=0)
    )


def _nll(logits_NV: Tensor, next_N: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits_NV.float(), next_N, reduction="none")


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
        log_p_N = self._log_p(logits_OV, self._chunks(text.old_ids_O, text.old_at_P, spans_N2, self._starts_old))
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

    @staticmethod
    def _log_p(logits_OV: Tensor, chunks: ChunkTargets[np.ndarray]) -> np.ndarray:
        tensors = ChunkTargets(
            row_N=torch.from_numpy(chunks.row_N),
            ids_NL=torch.from_numpy(chunks.ids_NL),
            num_ids_N=torch.from_numpy(chunks.num_ids_N),
            log_p_N=torch.from_numpy(chunks.log_p_N),
            tau=chunks.tau,
            starts_V=None if chunks.starts_V is None else torch.from_numpy(chunks.starts_V),
        )
        log_p_N: np.ndarray = log_q(logits_OV, tensors).numpy()
        return log_p_N
