"""What a record says of the drafter's own guesses: behind which draft id each was made, and how right it was.

Shapes: G guesses, P positions where an emitted target token begins at a draft boundary, M drafted nodes.
Lookup's guesses are not the drafter's. The later pieces of a split follow from its first one; how often, decoding
measures. A guess in a place that is no position (batch.py says which are) is left out.
"""

from dataclasses import dataclass

import numpy as np

from omnidraft.distill.examples.acceptance_labels import node_labels
from omnidraft.traces.record import SOURCES, Rounds, Source, TraceRecord

_SPLIT, _LOOKUP = SOURCES.index(Source.SPLIT), SOURCES.index(Source.LOOKUP)


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
