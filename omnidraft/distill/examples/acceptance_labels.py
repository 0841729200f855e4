"""Drafted tokens of a record with the target's verdict on each: labels for the acceptance head.

A label is conditional on the node's parent, as a node's acceptance in a tree is: the pieces of a split multiply along
the path. A merge is one node, so it has one label; the pieces before its last one are no target tokens. Where a draft
token is also read by itself, continuing from it is right for the merges that it begins too, so these count with it.
A node whose parent was not drawn, or that lies behind the end of the text, has no label.
`soft` labels are right for w = 0 (docs/algorithms.md, section 4), where drafting does not look at the target's noise;
the label for w = 1, 1 / sum_v max(p_v q_t / p_t, q_v), needs q of every token, and a record has it for drafted ones
alone. `right`, whether the token was drawn, has the right mean for every w, and under penalties, bias and grammars,
whose distribution no record has: there it stands for both.
Shapes: R rounds, M drafted nodes of all rounds together, L labelled ones, N targets of the head,
E emitted tokens, P positions, K log-probabilities per emitted token, T target ids. Letters: p is the target's raw
distribution, x the one after temperature and truncation.
Source: docs/algorithms.md, section 8; SpecDec++, https://arxiv.org/abs/2405.19715.
"""

from dataclasses import dataclass

import numpy as np

from omnidraft.distill.examples.targets import AcceptanceTargets, Positions
from omnidraft.params import SamplingNumbers
from omnidraft.traces.record import MAX_ID, SOURCES, Rounds, Source, TargetLogprobs, TraceRecord

_DIRECT, _SPLIT = (SOURCES.index(source) for source in (Source.DIRECT, Source.SPLIT))
LEAST_LOG_P = -1e5
"""Below every number of float16, so that a record which has -inf for all of its tokens still has a distribution."""


def acceptance_targets(
    record: TraceRecord, positions: Positions, draft_first_T: np.ndarray
) -> AcceptanceTargets[np.ndarray]:
    """Return the tokens that the drafter drafted at positions, with their labels.

    Prompt lookup's tokens are not the drafter's. The later pieces of a split follow from its first one; decoding
    measures how often. A token drafted outside the positions is left out.

    Args:
        draft_first_T: see node_labels.
    """
    labels = node_labels(record, draft_first_T)
    row_L = np.searchsorted(positions.emitted_P, labels.emitted_L)
    is_position_L = np.append(positions.emitted_P, len(record.emitted_ids))[row_L] == labels.emitted_L
    chosen_L = is_position_L & _is_drafters_M(record.rounds)[labels.node_L]
    return AcceptanceTargets(
        row_N=positions.at_P[row_L[chosen_L]],
        log_q_N=record.rounds.log_q_M[labels.node_L[chosen_L]].astype(np.float32),
        label_N=(labels.right_L if record.noise_weight else labels.soft_L)[chosen_L],
    )


@dataclass(frozen=True, slots=True)
class NodeLabels:
    """Labels in the order of the record's nodes."""

    node_L: np.ndarray  # int64, index of the drafted node among all of the record
    emitted_L: np.ndarray  # int64, index of the emitted token that was drawn at the node's position
    soft_L: np.ndarray  # float32, the target's probability of drawing it
    right_L: np.ndarray  # float32, 1 where it was drawn


def node_labels(record: TraceRecord, draft_first_T: np.ndarray) -> NodeLabels:
    """Return a label for every node that the target reached.

    Args:
        draft_first_T: the draft token that begins each target token (Alignment.draft_first_T).
    """
    rounds = record.rounds
    emitted_M, is_reached_M = _reached(rounds)
    node_L = np.flatnonzero(is_reached_M)
    emitted_L = emitted_M[node_L]
    is_right = _RightTokens(rounds.node_ids_M[node_L], rounds.sources_M[node_L] == _DIRECT, draft_first_T)
    right_L = is_right(record.emitted_ids[emitted_L]).astype(np.float32)
    if record.beliefs is None or record.temperature == 0 or not record.is_drawn_from_logprobs:
        return NodeLabels(node_L, emitted_L, right_L, right_L)
    shaped = target_distribution(record.beliefs, record)
    is_right_LK = is_right(shaped.ids_EK[emitted_L].T).T
    soft_L = np.where(is_right_LK, shaped.x_EK[emitted_L], 0.0).sum(axis=1)
    is_in_top_L = (shaped.ids_EK[emitted_L] == rounds.node_ids_M[node_L, None]).any(axis=1)
    soft_L += np.where(is_in_top_L, 0.0, shaped.other_E[emitted_L])
    return NodeLabels(node_L, emitted_L, soft_L.astype(np.float32), right_L)


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """The request's own distribution at each emitted position."""

    ids_EK: np.ndarray  # int64, the most probable tokens
    x_EK: np.ndarray  # float64, the probability that each is drawn
    other_E: np.ndarray  # float64, the upper bound for any single other token


def target_distribution(logprobs: TargetLogprobs, sampling: SamplingNumbers) -> TargetDistribution:
    """Return the distribution that the request drew from, computed from the log-probabilities of its record.

    Temperature, top-k, top-p and min-p are applied as decode/sampling/logits_pipeline.py does. Penalties, bias and
    grammars are not: a record says that they were there (`is_drawn_from_logprobs`), not what they did.
    For the temperature, the tail's tokens count as equally likely as the last of the top K; a cut of top-p or min-p
    that falls behind these leaves the tail whole.

    Args:
        sampling: its temperature is above 0; at 0 one token is drawn for certain.
    """
    temperature, top_k, top_p, min_p = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    log_p_EK = np.maximum(logprobs.top_log_p_EK.astype(np.float64), LEAST_LOG_P)
    weights_EK = np.exp((log_p_EK - log_p_EK[:, :1]) / temperature)
    least_E = weights_EK[:, -1]
    num_others_E = np.exp(np.minimum(logprobs.tail_log_p_E.astype(np.float64) - log_p_EK[:, -1], np.log(MAX_ID)))
    tail_E = num_others_E * least_E
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
        tail_E = np.where(least_E >= least_allowed_E, tail_E, 0.0)
    total_E = weights_EK.sum(axis=1) + tail_E
    other_E = np.minimum(tail_E, least_E) / total_E
    return TargetDistribution(logprobs.top_ids_EK.astype(np.int64), weights_EK / total_E[:, None], other_E)


@dataclass(frozen=True, slots=True)
class _RightTokens:
    """The target tokens that make each drafted one right."""

    id_L: np.ndarray
    is_direct_L: np.ndarray
    draft_first_T: np.ndarray

    def __call__(self, drawn_L: np.ndarray) -> np.ndarray:
        """Return a bool of the shape of `drawn_L`, whose last axis goes over the nodes."""
        begins_alike = self._begins_with(drawn_L) == self._begins_with(self.id_L)
        is_right: np.ndarray = (drawn_L == self.id_L) | (self.is_direct_L & begins_alike)
        return is_right

    def _begins_with(self, ids: np.ndarray) -> np.ndarray:
        """Return the first draft token of each id; a number outside every vocabulary for ids that the tokenizer does
        not know.
        """
        size = len(self.draft_first_T)
        known: np.ndarray = self.draft_first_T[np.minimum(ids, size - 1)]
        return np.where(ids < size, known, np.int64(np.iinfo(np.int64).max))


def _reached(rounds: Rounds) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the emitted token at each node's position, and whether the target reached the node [M].

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
    emitted_M = np.repeat(starts_R, num_nodes_R) + depth_M
    is_on_path_M = is_root_M | (accepted_M[parent_M] == 1)
    return emitted_M, is_on_path_M & (emitted_M < np.repeat(ends_R, num_nodes_R))


def _is_drafters_M(rounds: Rounds) -> np.ndarray:
    """Return whether the drafter chose each node: no memory, no grammar, and it is no later piece of a split. [M]"""
    num_nodes_R, parents_M = rounds.num_nodes_R.astype(np.int64), rounds.parents_M.astype(np.int64)
    parent_M = np.repeat(np.cumsum(num_nodes_R) - num_nodes_R, num_nodes_R) + parents_M - 1
    is_split_M = rounds.sources_M == _SPLIT
    is_later_M = is_split_M & (parents_M > 0) & is_split_M[parent_M]
    chosen_M: np.ndarray = rounds.drafted_by_model & ~is_later_M
    return chosen_M
