"""The target's beliefs at one record's positions, moved from target tokens to single draft tokens.

Shapes: P positions, K target tokens kept per position, S = K + 1 buckets: the last one is for a draft token that
spells several emitted target tokens. Letters: p is the target's distribution. algorithms.md, section 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnidraft.traces.record import Beliefs
from omnidraft.vocab.alignment import Alignment


@dataclass(frozen=True, slots=True)
class BeliefBuckets:
    """losses.Buckets of one record, as arrays."""

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


def belief_buckets(
    beliefs: Beliefs, emitted_P: np.ndarray, alignment: Alignment, splits: Sequence[Split]
) -> BeliefBuckets:
    """Mass per draft token at these emitted positions.

    A target token's mass lies with the draft token that begins it; one that cannot be drafted counts as rest.
    """
    ids_PK, mass_PK = _by_draft_token(beliefs, emitted_P, alignment)
    rest_P = np.exp(beliefs.tail_log_p_E[emitted_P].astype(np.float64))
    undraftable_PK = ids_PK == alignment.num_draft
    rest_P += np.where(undraftable_PK, mass_PK, 0.0).sum(axis=1)
    real_PS = np.pad((ids_PK >= 0) & ~undraftable_PK, ((0, 0), (0, 1)))
    ids_PS, mass_PS = np.pad(ids_PK, ((0, 0), (0, 1))), np.pad(mass_PK, ((0, 0), (0, 1)))
    for split in splits:
        _move(split, alignment, ids_PS, mass_PS, real_PS, rest_P)
    has_none_P = ~real_PS.any(axis=1)
    any_real_P = np.where(has_none_P, 0, ids_PS[np.arange(len(ids_PS)), real_PS.argmax(axis=1)])
    with np.errstate(divide="ignore"):
        log_p_PS, log_p_rest_P = np.log(np.where(real_PS, mass_PS, 0.0)), np.log(rest_P)
    return BeliefBuckets(
        np.where(real_PS, ids_PS, any_real_P[:, None]),
        log_p_PS.astype(np.float32),
        real_PS,
        log_p_rest_P.astype(np.float32),
    )


def _by_draft_token(beliefs: Beliefs, emitted_P: np.ndarray, alignment: Alignment) -> tuple[np.ndarray, np.ndarray]:
    """Distinct draft tokens in front, and their mass; places left over hold -1.

    `num_draft` stands for everything that cannot be drafted.
    """
    top_PK = beliefs.top_ids_EK[emitted_P].astype(np.int64)
    first_T = np.append(alignment.draft_first_T, alignment.num_draft)
    first_PK = first_T[np.minimum(top_PK, alignment.num_target)]
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
