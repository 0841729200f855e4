"""Trees laid out as rows of one width."""

import torch

from omnidraft.models.hf.tree_layout import lay_out
from tests.unit.decode.toys import tree

#     10
#    /  \
#   11   12
#  /  \    \
# 13  14   15
FORKED = tree([10, 11, 12, 13, 14, 15], [0, 0, 0, 1, 1, 2])


def test_each_leaf_has_a_row_that_spells_its_path():
    chains = lay_out(FORKED, rows=3, width=4)
    assert chains.ids_BS == ((10, 11, 13, 0), (10, 11, 14, 0), (10, 12, 15, 0))


def test_a_node_of_several_rows_is_read_from_the_first():
    chains = lay_out(FORKED, rows=3, width=4)
    assert chains.positions_N == ((0, 0), (0, 1), (2, 1), (0, 2), (1, 2), (2, 2))
    logits_BSV = torch.arange(12).reshape(3, 4, 1)
    assert chains.node_logits(logits_BSV).flatten().tolist() == [0, 1, 9, 2, 6, 10]


def test_rows_nobody_needs_hold_the_root():
    assert lay_out(tree([7], [0]), rows=2, width=3).ids_BS == ((7, 0, 0), (7, 0, 0))
    assert lay_out(tree([7, 8], [0, 0]), rows=2, width=2).ids_BS == ((7, 8), (7, 0))


def test_the_row_of_a_path_holds_all_of_it():
    chains = lay_out(FORKED, rows=4, width=3)
    assert [chains.row_of(path) for path in ([0], [0, 1], [0, 2], [0, 1, 4], [0, 2, 5])] == [0, 0, 2, 1, 2]


def test_a_chain_is_read_without_a_copy():
    logits_BSV = torch.randn(2, 4, 3)
    picked = lay_out(tree([5, 6, 7], [0, 0, 1]), rows=2, width=4).node_logits(logits_BSV)
    assert picked.data_ptr() == logits_BSV.data_ptr()
    assert torch.equal(picked, logits_BSV[0, :3])
