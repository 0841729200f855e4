"""Verification by itself: which tokens are drawn, from which nodes, and where the path ends."""

from omnidraft.decode.verification import draw_path
from tests.unit.decode.toys import tree

#        0
#      /   \
#     1     2      tokens 5, 6
#    / \     \
#   3   4     5    tokens 7, 8, 7
TREE = tree([9, 5, 6, 7, 8, 7], [0, 0, 0, 1, 1, 2])


def draw_tokens(wanted, ends=lambda token: False):
    """The path when the target wants these tokens in this order, and which draws it made."""
    calls = []

    def draw(node, index):
        calls.append((node, index))
        return wanted[index]

    return draw_path(TREE, draw, ends), calls


def test_nothing_drafted_was_drawn_so_one_token_is_emitted():
    path, calls = draw_tokens([4])
    assert (path.emitted, path.nodes, calls) == ((4,), (), [(0, 0)])


def test_a_whole_branch_was_drawn_and_one_more():
    path, calls = draw_tokens([6, 7, 3])
    assert (path.emitted, path.nodes) == ((6, 7, 3), (2, 5))
    assert calls == [(0, 0), (2, 1), (5, 2)]


def test_a_token_of_another_branch_is_no_child():
    path, _ = draw_tokens([6, 8])
    assert (path.emitted, path.nodes) == ((6, 8), (2,))


def test_the_path_ends_on_a_drafted_token_that_ends_the_text():
    path, calls = draw_tokens([5, 8, 3], ends=lambda token: token == 8)
    assert (path.emitted, path.nodes) == ((5, 8), (1, 4))
    assert calls == [(0, 0), (1, 1)]


def test_every_emitted_token_is_checked_once_whether_it_ends_the_text():
    seen = []
    draw_tokens([5, 7, 2], ends=lambda token: bool(seen.append(token)))
    assert seen == [5, 7, 2]


def test_an_empty_tree_is_plain_decoding():
    path = draw_path(tree([9], [0]), lambda node, index: 4, lambda token: False)
    assert (path.emitted, path.nodes) == ((4,), ())
