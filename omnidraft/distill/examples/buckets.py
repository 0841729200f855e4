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

from omnidraft.distill.examples.targets import BucketTargets, Positions, RankedTargets
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
    *by_token, rest_N = _draftable_mass(logprobs, positions, alignment.draft_first_T, alignment.num_draft)
    ids_NS, mass_NS, real_NS = (np.pad(column, ((0, 0), (0, 1))) for column in by_token)
    for split in splits:
        _move(split, alignment, ids_NS, mass_NS, real_NS, rest_N)
    return _from_mass(positions.at_P, ids_NS, mass_NS, real_NS, rest_N, positions.draft_P)


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
    return _from_mass(positions.at_P, ids_NK, mass_NK, real_NK, rest_N, positions.draft_P, rest_V=alignment.is_direct_D)


def nearest_buckets(
    logprobs: TargetLogprobs, positions: Positions, nearest_T: np.ndarray, num_draft: int
) -> BucketTargets[np.ndarray]:
    """Return the mass per draft token that target tokens are spelled most like.

    Args:
        nearest_T: that draft token of each target token, num_draft where there is none.
    """
    return _from_mass(positions.at_P, *_draftable_mass(logprobs, positions, nearest_T, num_draft), positions.draft_P)


def ranked_targets(logprobs: TargetLogprobs, positions: Positions) -> RankedTargets[np.ndarray]:
    """Return the probabilities of the target's likeliest tokens, by rank."""
    return RankedTargets(
        row_N=positions.at_P,
        p_NK=np.exp(-np.sort(-logprobs.top_log_p_EK[positions.emitted_P].astype(np.float32), axis=1)),
        p_rest_N=np.exp(logprobs.tail_log_p_E[positions.emitted_P].astype(np.float32)),
    )


def certain_buckets(
    row_N: np.ndarray, ids_N: np.ndarray, log_p_N: np.ndarray | None = None
) -> BucketTargets[np.ndarray]:
    """Return one bucket each, of the draft token that came next, and no rest; p is 1 unless given."""
    num = len(ids_N)
    return BucketTargets(
        row_N=row_N,
        ids_NS=ids_N[:, None],
        log_p_NS=(np.zeros(num, np.float32) if log_p_N is None else log_p_N)[:, None],
        real_NS=np.ones((num, 1), bool),
        log_p_rest_N=np.full(num, -np.inf, np.float32),
        emitted_N=ids_N,
    )


def one_against_all(
    buckets: BucketTargets[np.ndarray], chosen_N: np.ndarray, ids_N: np.ndarray
) -> BucketTargets[np.ndarray]:
    """Return, for each chosen position, the bucket of one draft token, and all else as the rest.

    The bucket has no mass where the position has none for the token.
    """
    is_it_NS = buckets.real_NS[chosen_N] & (buckets.ids_NS[chosen_N] == ids_N[:, None])
    mass_NS = np.where(buckets.real_NS[chosen_N], np.exp(buckets.log_p_NS[chosen_N].astype(np.float64)), 0.0)
    mass_N = np.where(is_it_NS, mass_NS, 0.0).sum(axis=1)
    rest_N = np.where(is_it_NS, 0.0, mass_NS).sum(axis=1) + np.exp(buckets.log_p_rest_N[chosen_N].astype(np.float64))
    real_N1 = np.ones((len(ids_N), 1), bool)
    row_N, emitted_N = buckets.row_N[chosen_N], buckets.emitted_N[chosen_N]
    return _from_mass(row_N, ids_N[:, None], mass_N[:, None], real_N1, rest_N, emitted_N)


def _from_mass(
    row_N: np.ndarray,
    ids_NS: np.ndarray,
    mass_NS: np.ndarray,
    real_NS: np.ndarray,
    rest_N: np.ndarray,
    emitted_N: np.ndarray,
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
        emitted_N=emitted_N,
        rest_V=rest_V,
    )


def _draftable_mass(
    logprobs: TargetLogprobs, positions: Positions, draft_of_T: np.ndarray, num_draft: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the draft tokens, their mass, which of these columns are real, and the rest, what cannot be drafted
    included."""
    ids_NK, mass_NK = _by_draft_token(logprobs, positions, draft_of_T, num_draft)
    undraftable_NK = ids_NK == num_draft
    rest_N = np.exp(logprobs.tail_log_p_E[positions.emitted_P].astype(np.float64))
    rest_N += np.where(undraftable_NK, mass_NK, 0.0).sum(axis=1)
    return ids_NK, mass_NK, (ids_NK >= 0) & ~undraftable_NK, rest_N


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
