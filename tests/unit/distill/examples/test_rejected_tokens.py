"""Which drafted tokens were refused, and where."""

import numpy as np

from omnidraft.distill.examples.acceptance_labels import rejected_tokens
from omnidraft.traces.record import Rounds
from omnidraft.traces.schema import ROUND_COLUMNS


def make_rounds(num_nodes, num_accepted, num_emitted, ids, parents, accepted) -> Rounds:
    columns = {
        "num_nodes_R": num_nodes,
        "num_accepted_R": num_accepted,
        "num_emitted_R": num_emitted,
        "node_ids_M": ids,
        "parents_M": parents,
        "accepted_M": accepted,
    }
    return Rounds(**{name: np.array(columns.get(name, []), kind) for name, kind in ROUND_COLUMNS.items()})


def test_children_of_the_last_accepted_node_were_refused_and_nothing_behind_them() -> None:
    """Round 0: 10 and 11 accepted, 12 and 13 stood where the target said its own; 14 behind 12, 15 beside 11.
    Round 1: 20 and 21 at its root."""
    rounds = make_rounds(
        [6, 2], [2, 0], [3, 1], [10, 11, 15, 12, 13, 14, 20, 21], [0, 1, 1, 2, 2, 4, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]
    )
    assert rejected_tokens(rounds).tolist() == [[2, 12], [2, 13], [3, 20], [3, 21]]


def test_a_round_that_ends_the_text_on_its_path_refused_nothing() -> None:
    rounds = make_rounds([3], [1], [1], [10, 11, 12], [0, 1, 0], [1, 0, 0])
    assert rejected_tokens(rounds).tolist() == []


def test_rounds_without_drafts_refused_nothing() -> None:
    assert rejected_tokens(make_rounds([0, 1, 0], [0, 0, 0], [1, 1, 1], [7], [0], [0])).tolist() == [[1, 7]]
    assert rejected_tokens(make_rounds([0, 0], [0, 0], [1, 1], [], [], [])).shape == (0, 2)
    assert rejected_tokens(make_rounds([], [], [], [], [], [])).shape == (0, 2)
