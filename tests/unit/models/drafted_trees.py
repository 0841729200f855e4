"""Drafted trees over the tiny models, and the check that each of their nodes is scored as its own path."""

import torch

from omnidraft.ports import DraftTree
from tests.unit.models.tiny import whole_pass

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def drafted(tokens, parents) -> DraftTree:
    return DraftTree(tuple(tokens), tuple(parents), (None,) * len(tokens), (0.0,) * len(tokens))


def path_to(tree: DraftTree, node: int) -> list[int]:
    return [*(path_to(tree, tree.parents[node]) if node else []), tree.tokens[node]]


def assert_tree_scores_are_those_of_its_paths(target, model, prompt, tree):
    """The check for every tree: each node as if its own path were the whole text."""
    session = target.open(prompt, 60, "fast")
    scores = session.score(tree)
    for node in range(len(tree)):
        alone = whole_pass(model, [*prompt[:-1], *path_to(tree, node)])[-1]
        torch.testing.assert_close(scores[node], alone, **CLOSE)
    return session


#        0
#       / \
#      1   2
#     / \   \
#    3   4   5 - 6 - 7 - 8 - 9 - 10       deeper than the sliding window
BUSHY = (0, 0, 0, 1, 1, 2, 5, 6, 7, 8, 9)
