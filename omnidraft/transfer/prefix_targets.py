"""What the old model expects next at every old token, as targets of a model whose tokens are several old ones.

Where both tokenisations meet, all new ids are in question, in buckets by their first old piece. Inside a new token,
after some of its old pieces, those are that begin with the same pieces, in buckets by the next one; the id that ends
there has what the old model expects and no longer id goes on with. All are read off one row of the new model's logits.
Shapes: D old ids, V new ids, O old ids and T new ids of a text, P points where they meet, C next pieces, N targets, S
buckets.
Source: docs/algorithms.md, section 14.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.examples.targets import PrefixTargets
from omnidraft.transfer.texts import AlignedText
from omnidraft.vocab.alignment import Alignment

NUM_BUCKETS = 32
"""The likeliest buckets of a target; the others are one rest."""
LEAST_MASS = 1e-3
"""What the old model must expect of the ids that a target is about; else nothing is learned there."""
_KNOWN_PREFIXES = 1 << 16


class Continuations(NamedTuple):
    """The new ids that begin with some old pieces, by the piece that comes next."""

    within: tuple[int, int]
    """Where all of them begin and end in the order of spellings."""
    ids_C: np.ndarray
    """int64; the next pieces."""
    spans_C2: np.ndarray
    """int64; where the ids with each begin and end."""
    is_whole_C: np.ndarray
    """bool; whether an id ends with that piece."""
    ends_here: bool
    """Whether an id has these pieces and no more; it is the first of them."""


@dataclass(frozen=True, slots=True)
class _Target:
    row: int
    within: tuple[int, int]
    spans_S2: np.ndarray
    p_S: np.ndarray


class PrefixBuckets:
    """The ids of a new vocabulary in the order of their old pieces."""

    def __init__(self, alignment: Alignment) -> None:
        """
        Args:
            alignment: of the old ids, as draft ids, with the new ones, as target ids.
        """
        pieces = alignment.drafts_of_target
        self._pieces = [pieces[token] for token in range(len(pieces))]
        order_V = sorted(range(len(pieces)), key=self._pieces.__getitem__)
        self.order_V = np.array(order_V, np.int64)
        self._sorted = [self._pieces[token] for token in order_V]
        firsts_V = pieces.firsts(default=-1)[self.order_V]
        ids_D = np.arange(alignment.num_draft)
        self._spans_D2 = np.stack([np.searchsorted(firsts_V, ids_D, side) for side in ("left", "right")], axis=1)
        self._bucket_D = np.append(alignment.draft_first_T, alignment.num_draft)[alignment.first_D]
        self.after = lru_cache(_KNOWN_PREFIXES)(self._after)

    @torch.no_grad()
    def of_text(self, text: AlignedText, logits_OD: Tensor) -> PrefixTargets[np.ndarray]:
        """Return the targets of a text, by rising row.

        Args:
            logits_OD: the old model's at each old id.
        """
        p_OD = logits_OD[:, : len(self._bucket_D)].float().softmax(dim=-1)
        targets = [*self._outer(text, p_OD), *self._inner(text, p_OD)]
        return _joined(sorted(targets, key=lambda target: target.row), self.order_V)

    def _outer(self, text: AlignedText, p_OD: Tensor) -> Iterator[_Target]:
        """Yield the target of each point: all new ids by their first piece, but those that the text cannot go on with.

        After a new id no piece comes that would have made a longer id of it.
        """
        row_P = text.new_at_P[:-1]
        p_PD = p_OD[torch.from_numpy(text.old_at_P[:-1])]
        for p_D, token in zip(p_PD, text.new_ids_T[row_P].tolist(), strict=True):
            if pieces := self._pieces[token]:
                after = self.after(pieces)
                p_D[torch.from_numpy(after.ids_C[after.is_whole_C])] = 0.0
        left_P = p_PD.sum(dim=1)
        likeliest_PK = p_PD.topk(min(NUM_BUCKETS, p_PD.shape[1]))
        everything = 0, len(self.order_V)
        columns = (each.numpy() for each in (left_P, likeliest_PK.values / left_P[:, None], likeliest_PK.indices))
        for row, left, p_K, ids_K in zip(row_P.tolist(), *columns, strict=True):
            if left > LEAST_MASS:
                ids_S, bucket_K = np.unique(self._bucket_D[ids_K], return_inverse=True)
                p_S, is_real_S = np.bincount(bucket_K, p_K, len(ids_S)), ids_S < len(self._bucket_D)
                yield _Target(row, everything, self._spans_D2[ids_S[is_real_S]], p_S[is_real_S])

    def _inner(self, text: AlignedText, p_OD: Tensor) -> Iterator[_Target]:
        """Yield the targets inside the new ids of a text that are several old ones."""
        at_P3 = np.stack([text.new_at_P[:-1], text.old_at_P[:-1], text.old_at_P[1:]], axis=1)
        for row, old, end in at_P3[np.diff(text.old_at_P) > 1].tolist():
            pieces = tuple(text.old_ids_O[old + 1 : end + 1].tolist())
            if pieces != self._pieces[text.new_ids_T[row + 1]]:  # several new ids, or a spelling for this text alone
                continue
            for num_read in range(1, len(pieces)):
                if (target := self._next_piece(row, self.after(pieces[:num_read]), p_OD[old + num_read])) is not None:
                    yield target

    @staticmethod
    def _next_piece(row: int, after: Continuations, p_D: Tensor) -> _Target | None:
        """Return the target of one inner place; None where it would say nothing."""
        p_C = p_D[torch.from_numpy(after.ids_C)].double().numpy()
        goes_on = float(p_C.sum())
        ends = max(1.0 - goes_on, 0.0) if after.ends_here else 0.0
        if goes_on + ends < LEAST_MASS or len(p_C) + after.ends_here < 2:
            return None
        likeliest = np.argsort(-p_C, kind="stable")[: NUM_BUCKETS - 1]
        first = after.within[0]
        spans_S2 = np.concatenate([[[first, first + after.ends_here]], after.spans_C2[likeliest]])
        return _Target(row, after.within, spans_S2, np.append(ends, p_C[likeliest]) / (goes_on + ends))

    def _after(self, pieces: tuple[int, ...]) -> Continuations:
        low = bisect_left(self._sorted, pieces)
        high = bisect_left(self._sorted, (*pieces[:-1], pieces[-1] + 1), lo=low)
        ends_here = low < high and self._sorted[low] == pieces
        start = low + ends_here
        next_ids = np.array([spelled[len(pieces)] for spelled in self._sorted[start:high]], np.int64)
        ids_C, first_C, num_C = np.unique(next_ids, return_index=True, return_counts=True)
        is_whole_C = np.array([len(self._sorted[start + first]) == len(pieces) + 1 for first in first_C.tolist()], bool)
        spans_C2 = start + np.stack([first_C, first_C + num_C], axis=1)
        return Continuations((low, high), ids_C, spans_C2, is_whole_C, ends_here)


def _joined(targets: Sequence[_Target], order_V: np.ndarray) -> PrefixTargets[np.ndarray]:
    low_NB, high_NB = (np.zeros((len(targets), 1 + NUM_BUCKETS), np.int64) for _ in range(2))
    p_NS = np.zeros((len(targets), NUM_BUCKETS), np.float32)
    for number, each in enumerate(targets):
        num = len(each.p_S)
        low_NB[number, 0], high_NB[number, 0] = each.within
        low_NB[number, 1 : num + 1], high_NB[number, 1 : num + 1] = each.spans_S2.T
        p_NS[number, :num] = each.p_S
    return PrefixTargets(
        row_N=np.array([each.row for each in targets], np.int64),
        low_NB=low_NB,
        high_NB=high_NB,
        p_NS=p_NS,
        p_rest_N=(1 - p_NS.sum(axis=1)).clip(min=0),
        order_V=order_V,
    )
