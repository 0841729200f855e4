"""Verification by itself: which tokens are drawn, from which nodes, and where the path ends."""

import pytest

from omnidraft.decode.verification import draw_path
from tests.unit.decode.toys import tree

#        0
#      /   \
#     1     2      tokens 5, 6
#    / \     \
#   3   4     5    tokens 7, 8, 7
TREE = tree([9, 5, 6, 7, 8, 7], [0, 0, 0, 1, 1, 2])
CASES = {
    "nothing drafted was drawn": (TREE, (4,), (), [0]),
    "a whole branch and one more": (TREE, (6, 7, 3), (2, 5), [0, 2, 5]),
    "a token of another branch": (TREE, (6, 8), (2,), [0, 2]),
    "an empty tree": (tree([9], [0]), (4,), (), [0]),
}


@pytest.mark.parametrize(("drafted", "drawn", "nodes", "drawn_from"), CASES.values(), ids=CASES)
def test_the_targets_draws_are_emitted_up_to_the_first_that_was_not_drafted(drafted, drawn, nodes, drawn_from):
    calls, ended = [], []
    path = draw_path(drafted, lambda node, index: calls.append((node, index)) or drawn[index], ended.append)
    assert (path.emitted, path.nodes) == (drawn, nodes)
    assert calls == [(node, index) for index, node in enumerate(drawn_from)]
    assert tuple(ended) == drawn  # each is looked at once


def test_the_path_ends_on_a_drafted_token_that_ends_the_text():
    path = draw_path(TREE, lambda node, index: (5, 8, 3)[index], lambda token: token == 8)
    assert (path.emitted, path.nodes) == ((5, 8), (1, 4))
