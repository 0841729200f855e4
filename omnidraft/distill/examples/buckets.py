"""The target's probability mass at one record's positions, moved from target tokens to single draft tokens.

A bucket is one draft token, and all other draft tokens together are the rest bucket. A target token's mass lies with
the draft token that begins it; what cannot be drafted counts as rest.
Shapes: N positions, K target tokens that the record holds per position, S buckets. Letters: p is the target's
distribution.
Source: docs/algorithms.md, section 6; OmniDraft, https://arxiv.org/abs/2507.02659, section 4.2, whose renormalised
intersection `direct_buckets` is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnidraft.distill.examples.targets import BucketTargets, Positions
from omnidraft.traces.record import TargetLogprobs
from omnidraft.vocab.alignment import Alignment


@dataclass(frozen=True, slots=True)
class Split:
    """A draft token that spells several emitted target tokens."""

    row: int
    """The position where it begins."""
    draft_id: int
    first_target: int
    """The first of the target tokens."""
    p: float
    """The product of their probabilities."""


def bucket_targets(
    logprobs: TargetLogprobs, positions: Positions, alignment: Alignment, splits: Sequence[Split]
) -> BucketTargets[np.ndarray]:
    """Return the mass per draft token that begins a target token; the last of S = K + 1 buckets is for splits."""
    ids_NK, mass_NK = _by_draft_token(logprobs, positions, alignment.draft_first_T, alignment.num_draft)
    undraftable_NK = ids_NK == alignment.num_draft
    rest_N = np.exp(logprobs.tail_log_p_E[positions.emitted_P].astype(np.float64))
    rest_N += np.where(undraftable_NK, mass_NK, 0.0).sum(axis=1)
    real_NK = (ids_NK >= 0) & ~undraftable_NK
    ids_NS, mass_NS, real_NS = (np.pad(column, ((0, 0), (0, 1))) for column in (ids_NK, mass_NK, real_NK))
    for split in splits:
        _move(split, alignment, ids_NS, mass_NS, real_NS, rest_N)
    return _from_mass(positions.at_P, ids_NS, mass_NS, real_NS, rest_N)


def direct_buckets(logprobs: TargetLogprobs, positions: Positions, alignment: Alignment) -> BucketTargets[np.ndarray]:
    """Return the mass per draft token that is a target token, renormalised over all of these.

    The whole tail counts as theirs.
    """
    ids_NK, mass_NK = _by_draft_token(logprobs, positions, alignment.direct_draft_T, alignment.num_draft)
    real_NK = (ids_NK >= 0) & (ids_NK < alignment.num_draft)
    rest_N = np.exp(logprobs.tail_log_p_E[positions.emitted_P].astype(np.float64))
    total_N = np.where(real_NK, mass_NK, 0.0).sum(axis=1) + rest_N
    rest_N = np.where(total_N > 0, rest_N, 1.0)
    total_N = np.where(total_N > 0, total_N, 1.0)
    mass_NK, rest_N = mass_NK / total_N[:, None], rest_N / total_N
    return _from_mass(positions.at_P, ids_NK, mass_NK, real_NK, rest_N, rest_V=alignment.is_direct_D)


def certain_buckets(row_N: np.ndarray, ids_N: np.ndarray) -> BucketTargets[np.ndarray]:
    """Return one bucket each, of the draft token that came next, and no rest."""
    num = len(ids_N)
    return BucketTargets(
        row_N=row_N,
        ids_NS=ids_N[:, None],
        log_p_NS=np.zeros((num, 1), np.float32),
        real_NS=np.ones((num, 1), bool),
        log_p_rest_N=np.full(num, -np.inf, np.float32),
    )


def _from_mass(
    row_N: np.ndarray,
    ids_NS: np.ndarray,
    mass_NS: np.ndarray,
    real_NS: np.ndarray,
    rest_N: np.ndarray,
    rest_V: np.ndarray | None = None,
) -> BucketTargets[np.ndarray]:
    any_real_N = np.where(real_NS.any(axis=1), ids_NS[np.arange(len(ids_NS)), real_NS.argmax(axis=1)], 0)
    with np.errstate(divide="ignore"):
        log_p_NS, log_p_rest_N = np.log(np.where(real_NS, mass_NS, 0.0)), np.log(rest_N)
    return BucketTargets(
        row_N=row_N,
        ids_NS=np.where(real_NS, ids_NS, any_real_N[:, None]),
        log_p_NS=log_p_NS.astype(np.float32),
        real_NS=real_NS,
        log_p_rest_N=log_p_rest_N.astype(np.float32),
        rest_V=rest_V,
    )


def _by_draft_token(
    logprobs: TargetLogprobs, positions: Positions, draft_of_T: np.ndarray, num_draft: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct draft tokens in front, and their mass; entries left over hold -1.

    `num_draft` stands for everything that cannot be drafted.
    """
    top_NK = logprobs.top_ids_EK[positions.emitted_P].astype(np.int64)
    draft_NK = np.append(draft_of_T, num_draft)[np.minimum(top_NK, len(draft_of_T))]
    order_NK = np.argsort(draft_NK, axis=1, kind="stable")
    draft_NK = np.take_along_axis(draft_NK, order_NK, axis=1)
    p_NK = np.take_along_axis(np.exp(logprobs.top_log_p_EK[positions.emitted_P].astype(np.float64)), order_NK, axis=1)
    is_next_NK = np.diff(draft_NK, axis=1, prepend=draft_NK[:, :1]) != 0
    bucket_NK = np.cumsum(is_next_NK, axis=1)
    row_N1 = np.arange(len(draft_NK))[:, None]
    ids_NK, mass_NK = np.full_like(draft_NK, -1), np.zeros_like(p_NK)
    ids_NK[row_N1, bucket_NK] = draft_NK
    np.add.at(mass_NK, (row_N1, bucket_NK), p_NK)
    return ids_NK, mass_NK


def _move(
    split: Split, alignment: Alignment, ids_NS: np.ndarray, mass_NS: np.ndarray, real_NS: np.ndarray, rest_N: np.ndarray
) -> None:
    """Move the mass of a text that one draft token spells to that token, from the one that begins the first of its
    target tokens.
    """
    row = split.row
    giver = np.flatnonzero(real_NS[row] & (ids_NS[row] == alignment.draft_first_T[split.first_target]))
    if len(giver):
        moved = min(split.p, mass_NS[row, giver[0]])
        mass_NS[row, giver[0]] -= moved
    else:
        moved = min(split.p, rest_N[row])
        rest_N[row] -= moved
    taker = np.flatnonzero(real_NS[row] & (ids_NS[row] == split.draft_id))
    bucket = taker[0] if len(taker) else ids_NS.shape[1] - 1
    ids_NS[row, bucket] = split.draft_id
    mass_NS[row, bucket] += moved
    real_NS[row, bucket] = True
