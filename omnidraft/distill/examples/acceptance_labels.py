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

from omnidraft.traces.record import SOURCES, Rounds, TargetLogprobs, TraceRecord

_DIRECT, _SPLIT, _LOOKUP = (SOURCES.index(source) for source in ("direct", "split", "lookup"))


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


@dataclass(frozen=True, slots=True)
class AcceptanceExamples:
    """In the order in which they were made."""

    at_G: np.ndarray
    """int64, index of the draft id whose hidden state the guess was drafted from."""
    log_q_G: np.ndarray
    """float32, the drafter's at that time, of all draft tokens that spell the guess."""
    soft_G: np.ndarray
    """float32; see agreement.labels for both labels. Where guesses looked at the target's noise it is `right_G`."""
    right_G: np.ndarray  # float32


def acceptance_examples(
    record: TraceRecord, emitted_P: np.ndarray, at_P: np.ndarray, draft_first_T: np.ndarray
) -> AcceptanceExamples:
    """
    Args:
        emitted_P: which of the record's emitted tokens, rising.
        at_P: the draft id that each of these is predicted from.
        draft_first_T: see node_labels.
    """
    labels = node_labels(record, draft_first_T)
    row_L = np.searchsorted(emitted_P, labels.position_L)
    is_position_L = np.append(emitted_P, len(record.emitted_ids))[row_L] == labels.position_L
    chosen_L = is_position_L & _is_drafters_M(record.rounds)[labels.node_L]
    return AcceptanceExamples(
        at_G=at_P[row_L[chosen_L]],
        log_q_G=record.rounds.log_q_M[labels.node_L[chosen_L]].astype(np.float32),
        soft_G=(labels.right_L if record.noise_weight else labels.soft_L)[chosen_L],
        right_G=labels.right_L[chosen_L],
    )


def _is_drafters_M(rounds: Rounds) -> np.ndarray:
    """Whether the drafter chose the node: it is no lookup, and no later piece of a split. [M]"""
    num_nodes_R, parents_M = rounds.num_nodes_R.astype(np.int64), rounds.parents_M.astype(np.int64)
    parent_M = np.repeat(np.cumsum(num_nodes_R) - num_nodes_R, num_nodes_R) + parents_M - 1
    is_split_M = rounds.sources_M == _SPLIT
    is_later_M = is_split_M & (parents_M > 0) & is_split_M[parent_M]
    chosen_M: np.ndarray = (rounds.sources_M != _LOOKUP) & ~is_later_M
    return chosen_M


def rejected_tokens(rounds: Rounds) -> np.ndarray:
    """int64 [N, 2]: index of the emitted token, and the target id drafted there; in the order of the text."""
    num_nodes_R = rounds.num_nodes_R.astype(np.int64)
    round_M = np.repeat(np.arange(len(num_nodes_R)), num_nodes_R)
    node_M = np.arange(len(round_M)) - (np.cumsum(num_nodes_R) - num_nodes_R)[round_M] + 1  # 0 is the root
    last_R = np.zeros(len(num_nodes_R), np.int64)
    np.maximum.at(last_R, round_M, np.where(rounds.accepted_M == 1, node_M, 0))
    num_emitted_R, num_accepted_R = rounds.num_emitted_R.astype(np.int64), rounds.num_accepted_R.astype(np.int64)
    own_R = np.cumsum(num_emitted_R) - 1
    has_own_R = num_emitted_R == num_accepted_R + 1
    is_rejected_M = has_own_R[round_M] & (rounds.parents_M == last_R[round_M]) & (rounds.accepted_M == 0)
    return np.stack([own_R[round_M], rounds.node_ids_M.astype(np.int64)], axis=1)[is_rejected_M]


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """At each emitted position."""

    ids_EK: np.ndarray  # int64, the most probable tokens
    x_EK: np.ndarray  # float64, the chance that each is drawn
    other_E: np.ndarray  # float64, what any single other token can have at most


def target_distribution(
    beliefs: TargetLogprobs, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None = None
) -> TargetDistribution:
    """
    Args:
        temperature: above 0; at 0 one token is drawn for certain.
    """
    log_p_EK = beliefs.top_log_p_EK.astype(np.float64)
    least_E = log_p_EK[:, -1]
    weights_EK = np.exp(log_p_EK / temperature)
    tail_E = np.exp(beliefs.tail_log_p_E.astype(np.float64) + least_E * (1 / temperature - 1))
    if top_k is not None and top_k <= log_p_EK.shape[1]:
        weights_EK[:, top_k:], tail_E = 0.0, np.zeros_like(tail_E)
    if top_p is not None:
        front_E1 = top_p * (weights_EK.sum(axis=1) + tail_E)[:, None]
        mass_EK = np.cumsum(weights_EK, axis=1)
        weights_EK = np.where(mass_EK - weights_EK < front_E1, weights_EK, 0.0)
        tail_E = np.where(mass_EK[:, -1] < front_E1[:, 0], tail_E, 0.0)
    if min_p is not None:
        least_allowed_E = min_p * weights_EK[:, 0]
        weights_EK = np.where(weights_EK >= least_allowed_E[:, None], weights_EK, 0.0)
        tail_E = np.where(np.exp(least_E / temperature) >= least_allowed_E, tail_E, 0.0)
    total_E = weights_EK.sum(axis=1) + tail_E
    other_E = np.minimum(tail_E, np.exp(least_E / temperature)) / total_E
    return TargetDistribution(beliefs.top_ids_EK.astype(np.int64), weights_EK / total_E[:, None], other_E)
