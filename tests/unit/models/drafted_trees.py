"""Drafted trees over the tiny models, and checks of their scores: each node is scored as its own path."""

import torch

from omnidraft.ports import DraftTree
from tests.unit.models.tiny import whole_pass

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def drafted(tokens, parents) -> DraftTree:
    return DraftTree(tuple(tokens), tuple(parents), (None,) * len(tokens), (0.0,) * len(tokens))


def chain(tokens) -> DraftTree:
    return drafted(tokens, (0, *range(len(tokens) - 1)))


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


def scores_by_partition(target, prompt, following, sizes) -> torch.Tensor:
    """Logits after the last prompt id and each following one, scored in chains of these sizes. [S, V]"""
    session, rows, at = target.open(prompt, 40, "reproducible"), [], 0
    ids = [prompt[-1], *following]
    for size in sizes:
        rows.append(session.score(chain(ids[at : at + size])))
        session.keep(range(len(rows[-1])))
        at += size
    return torch.cat(rows)


#        0
#       / \
#      1   2
#     / \   \
#    3   4   5 - 6 - 7 - 8 - 9 - 10       deeper than the sliding window
BUSHY = (0, 0, 0, 1, 1, 2, 5, 6, 7, 8, 9)
