"""What the target believes at some positions, in draft tokens, and what the drafter gives the same tokens.

Shapes: N positions, V the drafter's vocabulary, S buckets of single draft tokens at one position, B = S + 1 with the
rest bucket last. Letters: p is the target's distribution and P its mass per bucket, q and Q the drafter's.
A bucket is one draft token, and all other draft tokens are the rest bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from omnidraft.traces.record import TargetLogprobs
from omnidraft.vocab.alignment import Alignment

LOG_P_FLOOR = -14.0
"""No bucket is believed to be less likely: the log-probabilities of a trace have 11 bits."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """What the target believes at N positions, in draft tokens; rows are padded to the widest."""

    ids_NS: Tensor
    """int64; a padded place repeats an id of its row."""
    log_p_NS: Tensor
    """float32, -inf where the mass is zero."""
    real_NS: Tensor
    """bool, False at padding."""
    log_p_rest_N: Tensor
    """float32, -inf when nothing is outside."""
    emitted_N: Tensor
    """int64; the draft token that came next, or an id that the drafter has not."""
    rest_V: Tensor | None = None
    """bool; draft tokens that may be in the rest, the others belong nowhere; None: all."""

    def __getitem__(self, rows: slice | Tensor) -> "Buckets":
        return Buckets(
            self.ids_NS[rows],
            self.log_p_NS[rows],
            self.real_NS[rows],
            self.log_p_rest_N[rows],
            self.emitted_N[rows],
            self.rest_V,
        )


@dataclass(frozen=True, slots=True)
class BucketTargets:
    """buckets.Buckets of one record, as arrays."""

    ids_PS: np.ndarray  # int64
    log_p_PS: np.ndarray  # float32, -inf where the mass is zero
    real_PS: np.ndarray  # bool
    log_p_rest_P: np.ndarray  # float32


@dataclass(frozen=True, slots=True)
class Split:
    """At position `row` the draft token `draft_id` spells several emitted target tokens, of which the first is
    `first_target`; `p` is the product of their probabilities."""

    row: int
    draft_id: int
    first_target: int
    p: float


def bucket_targets(
    beliefs: TargetLogprobs, emitted_P: np.ndarray, alignment: Alignment, splits: Sequence[Split]
) -> BucketTargets:
    """Mass per draft token at these emitted positions.

    A target token's mass lies with the draft token that begins it; one that cannot be drafted counts as rest.
    """
    ids_PK, mass_PK = _by_draft_token(beliefs, emitted_P, alignment.draft_first_T, alignment.num_draft)
    rest_P = np.exp(beliefs.tail_log_p_E[emitted_P].astype(np.float64))
    undraftable_PK = ids_PK == alignment.num_draft
    rest_P += np.where(undraftable_PK, mass_PK, 0.0).sum(axis=1)
    real_PS = np.pad((ids_PK >= 0) & ~undraftable_PK, ((0, 0), (0, 1)))
    ids_PS, mass_PS = np.pad(ids_PK, ((0, 0), (0, 1))), np.pad(mass_PK, ((0, 0), (0, 1)))
    for split in splits:
        _move(split, alignment, ids_PS, mass_PS, real_PS, rest_P)
    return _as_buckets(ids_PS, mass_PS, real_PS, rest_P)


def direct_buckets(beliefs: TargetLogprobs, emitted_P: np.ndarray, alignment: Alignment) -> BucketTargets:
    """Mass per draft token that is a target token, renormalised over all of these; the whole tail counts as theirs."""
    ids_PK, mass_PK = _by_draft_token(beliefs, emitted_P, alignment.direct_draft_T, alignment.num_draft)
    real_PK = (ids_PK >= 0) & (ids_PK < alignment.num_draft)
    rest_P = np.exp(beliefs.tail_log_p_E[emitted_P].astype(np.float64))
    total_P = np.where(real_PK, mass_PK, 0.0).sum(axis=1) + rest_P
    rest_P = np.where(total_P > 0, rest_P, 1.0)
    total_P = np.where(total_P > 0, total_P, 1.0)
    return _as_buckets(ids_PK, mass_PK / total_P[:, None], real_PK, rest_P / total_P)


def certain_buckets(ids_N: np.ndarray, log_p_N: np.ndarray) -> BucketTargets:
    """One bucket each and no rest."""
    return BucketTargets(
        ids_N[:, None],
        log_p_N.astype(np.float32)[:, None],
        np.ones((len(ids_N), 1), bool),
        np.full(len(ids_N), -np.inf, np.float32),
    )


def one_against_all(buckets: BucketTargets, row_N: np.ndarray, ids_N: np.ndarray) -> BucketTargets:
    """The bucket of one draft token in each of these rows, and all else as the rest; without mass when it is none."""
    is_it_NS = buckets.real_PS[row_N] & (buckets.ids_PS[row_N] == ids_N[:, None])
    mass_NS = np.where(buckets.real_PS[row_N], np.exp(buckets.log_p_PS[row_N].astype(np.float64)), 0.0)
    mass_N = np.where(is_it_NS, mass_NS, 0.0).sum(axis=1)
    rest_N = np.where(is_it_NS, 0.0, mass_NS).sum(axis=1) + np.exp(buckets.log_p_rest_P[row_N].astype(np.float64))
    return _as_buckets(ids_N[:, None], mass_N[:, None], np.ones((len(ids_N), 1), bool), rest_N)


def _as_buckets(ids_PS: np.ndarray, mass_PS: np.ndarray, real_PS: np.ndarray, rest_P: np.ndarray) -> BucketTargets:
    any_real_P = np.where(real_PS.any(axis=1), ids_PS[np.arange(len(ids_PS)), real_PS.argmax(axis=1)], 0)
    with np.errstate(divide="ignore"):
        log_p_PS, log_p_rest_P = np.log(np.where(real_PS, mass_PS, 0.0)), np.log(rest_P)
    return BucketTargets(
        np.where(real_PS, ids_PS, any_real_P[:, None]),
        log_p_PS.astype(np.float32),
        real_PS,
        log_p_rest_P.astype(np.float32),
    )


def _by_draft_token(
    beliefs: TargetLogprobs, emitted_P: np.ndarray, draft_of_T: np.ndarray, num_draft: int
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct draft tokens in front, and their mass; places left over hold -1.

    `num_draft` stands for everything that cannot be drafted.
    """
    top_PK = beliefs.top_ids_EK[emitted_P].astype(np.int64)
    first_PK = np.append(draft_of_T, num_draft)[np.minimum(top_PK, len(draft_of_T))]
    order_PK = np.argsort(first_PK, axis=1, kind="stable")
    first_PK = np.take_along_axis(first_PK, order_PK, axis=1)
    p_PK = np.take_along_axis(np.exp(beliefs.top_log_p_EK[emitted_P].astype(np.float64)), order_PK, axis=1)
    is_next_PK = np.diff(first_PK, axis=1, prepend=first_PK[:, :1]) != 0
    group_PK = np.cumsum(is_next_PK, axis=1)
    rows_P1 = np.arange(len(first_PK))[:, None]
    ids_PK, mass_PK = np.full_like(first_PK, -1), np.zeros_like(p_PK)
    ids_PK[rows_P1, group_PK] = first_PK
    np.add.at(mass_PK, (rows_P1, group_PK), p_PK)
    return ids_PK, mass_PK


def _move(
    split: Split,
    alignment: Alignment,
    ids_PS: np.ndarray,
    mass_PS: np.ndarray,
    real_PS: np.ndarray,
    rest_P: np.ndarray,
) -> None:
    """The mass of a text that one draft token spells belongs to that token, not to the one that begins its first
    target token."""
    row = split.row
    giver = np.flatnonzero(real_PS[row] & (ids_PS[row] == alignment.draft_first_T[split.first_target]))
    if len(giver):
        moved = min(split.p, mass_PS[row, giver[0]])
        mass_PS[row, giver[0]] -= moved
    else:
        moved = min(split.p, rest_P[row])
        rest_P[row] -= moved
    taker = np.flatnonzero(real_PS[row] & (ids_PS[row] == split.draft_id))
    place = taker[0] if len(taker) else ids_PS.shape[1] - 1
    ids_PS[row, place] = split.draft_id
    mass_PS[row, place] += moved
    real_PS[row, place] = True
