"""Soft labels for the acceptance head: how likely the target was to draw each token that was drafted for it.

A label is given its parent, as a node's chance in a tree is: the pieces of a split multiply along the path. A merge is
one node, so it has one label; the pieces that come before its last one are no target tokens. Where a draft token is
read by itself, going on from it is right for the merges that it begins too, so these count with it.
What was not reached, because its parent was not drawn or the text had ended, has no label.
`soft_L` is right for w = 0 (algorithms.md section 3), where the guess does not look at the target's noise; the w = 1
label of section 6, 1 / sum_v max(p_v q_t / p_t, q_v), needs q of every token, and a record has that of what was drafted
alone. `right_L`, what was drawn, has the right mean for every w, and under penalties, bias and grammars, whose
distribution no record has: there it stands for both.
Shapes: M drafted nodes, L labelled ones, E emitted tokens, K log-probabilities kept, T target ids.
"""

from dataclasses import dataclass

import numpy as np

from omnidraft.distill.examples.target_distribution import target_distribution
from omnidraft.traces.record import SOURCES, Rounds, Source, TraceRecord

_DIRECT = SOURCES.index(Source.DIRECT)


@dataclass(frozen=True, slots=True)
class NodeLabels:
    """In the order of the record's nodes."""

    node_L: np.ndarray  # int64, index of the drafted node among all of the record
    position_L: np.ndarray  # int64, index of the emitted token that was drawn in its place
    soft_L: np.ndarray  # float32, the target's chance of drawing it
    right_L: np.ndarray  # float32, 1 where it was drawn


def node_labels(record: TraceRecord, draft_first_T: np.ndarray) -> NodeLabels:
    """
    Args:
        draft_first_T: the draft token that begins each target token (Alignment.draft_first_T).
    """
    rounds = record.rounds
    position_M, is_reached_M = _reached(rounds)
    node_L = np.flatnonzero(is_reached_M)
    position_L = position_M[node_L]
    counts = _Counting(rounds.node_ids_M[node_L], rounds.sources_M[node_L] == _DIRECT, draft_first_T)
    right_L = counts(record.emitted_ids[position_L]).astype(np.float32)
    if record.beliefs is None or record.temperature == 0 or not record.is_drawn_from_logprobs:
        return NodeLabels(node_L, position_L, right_L, right_L)
    draws = target_distribution(record.beliefs, record.temperature, record.top_k, record.top_p, record.min_p)
    counted_LK = counts(draws.ids_EK[position_L].T).T
    soft_L = np.where(counted_LK, draws.x_EK[position_L], 0.0).sum(axis=1)
    is_kept_L = (draws.ids_EK[position_L] == rounds.node_ids_M[node_L, None]).any(axis=1)
    soft_L += np.where(is_kept_L, 0.0, draws.other_E[position_L])
    return NodeLabels(node_L, position_L, soft_L.astype(np.float32), right_L)


@dataclass(frozen=True, slots=True)
class _Counting:
    """Which target tokens prove drafted ones right."""

    id_L: np.ndarray
    is_direct_L: np.ndarray
    draft_first_T: np.ndarray

    def __call__(self, drawn_L: np.ndarray) -> np.ndarray:
        """bool, of the shape of `drawn_L`, whose last axis goes over the nodes."""
        begins_alike = self._begins_with(drawn_L) == self._begins_with(self.id_L)
        counted: np.ndarray = (drawn_L == self.id_L) | (self.is_direct_L & begins_alike)
        return counted

    def _begins_with(self, ids: np.ndarray) -> np.ndarray:
        """The draft token; none of any vocabulary for ids that the tokenizer does not know."""
        size = len(self.draft_first_T)
        known: np.ndarray = self.draft_first_T[np.minimum(ids, size - 1)]
        return np.where(ids < size, known, np.int64(np.iinfo(np.int64).max))


def _reached(rounds: Rounds) -> tuple[np.ndarray, np.ndarray]:
    """Index of the emitted token in the place of each node, and whether there is one [M].

    A parent stands before its child, so the accepted nodes of a round come in the order of the path.
    """
    num_nodes_R = rounds.num_nodes_R.astype(np.int64)
    ends_R = np.cumsum(rounds.num_emitted_R, dtype=np.int64)
    starts_R = ends_R - rounds.num_emitted_R
    first_M = np.repeat(np.cumsum(num_nodes_R) - num_nodes_R, num_nodes_R)
    accepted_M = rounds.accepted_M.astype(np.int64)
    running_M = np.concatenate([np.zeros(1, np.int64), np.cumsum(accepted_M)])
    parents_M = rounds.parents_M.astype(np.int64)
    parent_M = first_M + parents_M - 1
    is_root_M = parents_M == 0
    depth_M = running_M[first_M + parents_M] - running_M[first_M]
    position_M = np.repeat(starts_R, num_nodes_R) + depth_M
    is_on_path_M = is_root_M | (accepted_M[parent_M] == 1)
    return position_M, is_on_path_M & (position_M < np.repeat(ends_R, num_nodes_R))
