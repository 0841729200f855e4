"""Bits per byte of texts: what models of different tokenizers are compared by.

It is the negative log-likelihood of a text's own tokenisation over the number of its bytes. Other tokenisations of the
same bytes have likelihood too, so it is an upper bound of what the text costs, for either tokenizer.
Shapes: T ids of a text, N rows of logits, V vocabulary, H hidden size.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from omnidraft.ports import PackedTexts, TrainableDrafter

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
