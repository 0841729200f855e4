"""Boundaries that two tokenisations of the same bytes have in common.

Shapes: T target tokens, D draft tokens, P target positions that begin at a draft boundary, M merges, S splits.
It works on byte lengths only: the caller ensures that the bytes are the same.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class BoundaryAlignment:
    """Common boundaries, merges and splits. All arrays are int64 and in text order."""

    target_P: np.ndarray
    """Target positions whose first byte is a draft boundary."""
    draft_P: np.ndarray
    """Draft tokens before that byte: the index of the draft token that begins there, D at the end."""
    merges_M3: np.ndarray
    """target position, first draft position, one past the last: two or more draft tokens spell one target token."""
    splits_S3: np.ndarray
    """draft position, first target position, one past the last: one draft token spells several target tokens."""


def align_boundaries(draft_num_bytes_D: np.ndarray, target_num_bytes_T: np.ndarray) -> BoundaryAlignment:
    """Find every byte where both have a boundary.

    One side may end earlier: tokens that begin after its end are left out. A token without bytes stands between its
    neighbours and belongs to no merge or split.
    """
    draft_ends_D = np.cumsum(draft_num_bytes_D, dtype=np.int64)
    target_ends_T = np.cumsum(target_num_bytes_T, dtype=np.int64)
    before_T = _tokens_before(draft_ends_D, target_ends_T - target_num_bytes_T)
    target_P = np.flatnonzero(before_T.reached)
    return BoundaryAlignment(
        target_P=target_P,
        draft_P=before_T.count[target_P],
        merges_M3=_covers(draft_ends_D, target_ends_T, target_num_bytes_T),
        splits_S3=_covers(target_ends_T, draft_ends_D, draft_num_bytes_D),
    )


@dataclass(frozen=True, slots=True)
class _Before:
    count: np.ndarray  # tokens that end at or before each byte
    reached: np.ndarray  # whether one of them ends exactly there


def _tokens_before(ends: np.ndarray, at: np.ndarray) -> _Before:
    count = np.searchsorted(ends, at, side="right")
    boundaries = np.concatenate([np.zeros(1, np.int64), ends])
    return _Before(count, boundaries[count] == at)


def _covers(part_ends: np.ndarray, whole_ends: np.ndarray, whole_num_bytes: np.ndarray) -> np.ndarray:
    """Return [whole, first part, one past the last part] where two or more parts make up exactly one whole."""
    starts = _tokens_before(part_ends, whole_ends - whole_num_bytes)
    ends = _tokens_before(part_ends, whole_ends)
    last = np.searchsorted(part_ends, whole_ends, side="left") + 1  # parts without bytes after the end stay outside
    is_cover = starts.reached & ends.reached & (whole_num_bytes > 0) & (last - starts.count >= 2)
    wholes = np.flatnonzero(is_cover)
    return np.stack([wholes, starts.count[wholes], last[wholes]], axis=1)
