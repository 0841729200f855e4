"""Bits per byte of texts: what models of different tokenizers are compared by.

It is the negative log-likelihood of a text's own tokenisation over the number of its bytes. Other tokenisations of the
same bytes have likelihood too, so it is an upper bound of what the text costs, for either tokenizer.
Shapes: T ids of a text, N rows of logits, V vocabulary, H hidden size.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from omnidraft.ports import PackedTexts, TrainableDrafter
from omnidraft.progress import bar
from omnidraft.transfer.texts import AlignedText

_LOGIT_ROWS = 256
"""Rows of logits that exist at a time."""


def bits_per_byte(model: TrainableDrafter, texts: Sequence[AlignedText], side: Literal["old", "new"]) -> float:
    """Return the bits that texts cost a model of the old tokenizer or of the new one, over the number of their bytes;
    show progress."""
    nats: list[float] = []
    with bar("measuring bits per byte", len(texts), transient=True) as advance:
        for text in texts:
            nats += _token_nats(model, text.old_ids_O if side == "old" else text.new_ids_T).tolist()
            advance()
    return math.fsum(nats) / math.log(2) / sum(text.num_bytes for text in texts)


@torch.no_grad()
def hidden_states(model: TrainableDrafter, ids_T: np.ndarray) -> Tensor:
    """Return the last hidden states [T, H] of one text."""
    num = len(ids_T)
    return model.hidden(
        PackedTexts(torch.from_numpy(ids_T), torch.zeros(num, dtype=torch.int64), torch.arange(num), num_context=0)
    )


@torch.no_grad()
def _token_nats(model: TrainableDrafter, ids_T: np.ndarray) -> Tensor:
    """Return the negative log-likelihood of each id but the first, float32 [T - 1]."""
    hidden_TH, next_T = hidden_states(model, ids_T)[:-1], torch.from_numpy(ids_T[1:])
    parts = zip(hidden_TH.split(_LOGIT_ROWS), next_T.split(_LOGIT_ROWS), strict=True)
    nll = torch.nn.functional.cross_entropy
    return torch.cat([nll(model.logits(hidden_NH).float(), next_N, reduction="none") for hidden_NH, next_N in parts])
