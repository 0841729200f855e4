"""A tree under construction: one node per draft token, values that multiply, and the best part of it that fits."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.sampling.noise import ForbiddenNoise
from omnidraft.ports import Source, TreeLimits

GUESSES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 4), st.floats(0.01, 0.99)), max_size=12
)  # (parent modulo what is there, token, chance)


LIMITS = TreeLimits(6)


def new_tree(limits) -> DraftTreeBuilder:
    return DraftTreeBuilder(7, limits, ForbiddenNoise())


def built(nodes, limits=LIMITS) -> DraftTreeBuilder:
    tree = new_tree(limits)
    for parent, token, chance in nodes:
        tree.add(parent % len(tree.nodes), token, Source.DIRECT, chance)
    return tree


def test_two_proposers_that_say_the_same_share_a_node_and_the_surer_one_counts():
    tree = new_tree(TreeLimits(4))
    node = tree.add(0, 3, Source.LOOKUP, 0.2)
    assert tree.add(0, 3, Source.DIRECT, 0.6) == node
    assert tree.num_drafted == 1
    assert tree.nodes[node].source == Source.LOOKUP
    assert tree.values()[node] == 0.6


def test_where_the_drafter_is_sure_a_memory_that_says_otherwise_is_worth_little_and_the_other_way_round():
    for sure, doubtful in ((Source.DIRECT, Source.SUFFIX), (Source.SUFFIX, Source.DIRECT)):
        tree = new_tree(TreeLimits(4))
        nodes = [
            tree.add(0, token, source, chance) for token, (source, chance) in enumerate([(sure, 0.9), (doubtful, 0.6)])
        ]
        tree.exclude_siblings()
        assert [tree.values()[node] for node in nodes] == pytest.approx([0.9, 0.1])


@settings(max_examples=150)
@given(GUESSES)
def test_what_one_source_says_excludes_nothing_else_that_it_says(nodes):
    tree = built(nodes)
    before = list(tree.values())
    tree.exclude_siblings()
    assert tree.values() == before


def test_a_guess_below_the_last_depth_is_not_added():
    tree = new_tree(TreeLimits(1))
    node = tree.add(0, 3, Source.DIRECT, 0.5)
    assert tree.add(node, 4, Source.DIRECT, 0.5) is None
    assert tree.num_drafted == 1


@settings(max_examples=150)
@given(GUESSES, st.integers(0, 8), st.none() | st.integers(1, 3), st.none() | st.integers(1, 4))
def test_every_front_of_the_ranking_is_a_tree_that_fits(nodes, num_nodes, num_chains, depth):
    limits = TreeLimits(num_nodes, num_chains, depth)
    tree = built(nodes, limits)
    order = tree.ranked()
    for length in range(len(order) + 1):
        cut = tree.build(order[:length])
        assert cut.fits(limits)
        assert all(parent < node for node, parent in enumerate(cut.parents) if node)
        siblings = list(zip(cut.parents, cut.tokens, strict=True))[1:]
        assert len(set(siblings)) == len(siblings)


@settings(max_examples=100)
@given(GUESSES, st.integers(1, 5))
def test_without_a_limit_on_chains_no_other_tree_of_that_size_is_worth_more(nodes, num_nodes):
    tree = built(nodes, TreeLimits(num_nodes))
    order = tree.ranked()
    worth = sum(tree.values()[node] for node in order)
    for other in combinations(range(1, len(tree.nodes)), len(order)):
        if all(tree.nodes[node].parent in (0, *other) for node in other):
            assert sum(tree.values()[node] for node in other) <= worth + 1e-9


@settings(max_examples=100)
@given(GUESSES)
def test_a_single_chain_is_the_most_valuable_one(nodes):
    tree = built(nodes, TreeLimits(9, num_chains=1))
    order = tree.ranked()
    assert tree.build(order).is_chain
    worth = sum(tree.values()[node] for node in order)
    assert worth == pytest.approx(
        max(sum(map(tree.values().__getitem__, _path(tree, node))) for node in range(len(tree.nodes)))
    )


def _path(tree: DraftTreeBuilder, node: int) -> list[int]:
    path = []
    while node:
        path.append(node)
        node = tree.nodes[node].parent
    return path
