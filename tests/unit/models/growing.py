"""Random trees that fit a target's limits, with a known text planted along one of their paths."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from omnidraft.ports import DraftTree, Noise, Request, TreeLimits
from tests.unit.decode.toys import tree


def grow(
    rng: np.random.Generator, root: int, true_ids: Sequence[int], limits: TreeLimits, vocab_size: int
) -> DraftTree:
    """Nodes are added at random places as long as the tree fits; each second one that can be true is."""
    grown, on_path = DraftTree.empty(root), {0}
    for _ in range(int(rng.integers(2 * limits.num_nodes + 1))):
        parent = int(rng.integers(len(grown)))
        depth = grown.depths[parent]
        is_true = parent in on_path and depth < len(true_ids) and rng.random() < 0.6
        token = true_ids[depth] if is_true else int(rng.integers(vocab_size))
        larger = tree([*grown.tokens, token], [*grown.parents, parent])
        if larger.fits(limits) and grown.child(parent, token) is None:
            on_path |= {len(grown)} if is_true else set()
            grown = larger
    return grown


def true_path(grown: DraftTree, true_ids: Sequence[int]) -> list[int]:
    """The nodes that spell the text, the root first."""
    nodes = [0]
    for token in true_ids:
        child = grown.child(nodes[-1], token)
        if child is None:
            break
        nodes.append(child)
    return nodes


@dataclass
class Knowing:
    """A proposer that knows the text and hides it among wrong branches."""

    text: Sequence[int]
    limits: TreeLimits
    vocab_size: int
    seed: int
    num_branched: int = 0
    """Trees of several chains that it gave."""

    def open(self, request: Request) -> "_Session":
        return _Session(self, np.random.default_rng(self.seed), [request.prompt_ids[-1]])


@dataclass
class _Session:
    proposer: Knowing
    rng: np.random.Generator
    ids: list[int] = field(default_factory=list)

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        own = self.proposer.limits
        fitting = replace(own, num_nodes=min(limits.num_nodes, own.num_nodes))
        text = self.proposer.text[len(self.ids) - 1 :]
        grown = grow(self.rng, self.ids[-1], text, fitting, self.proposer.vocab_size)
        self.proposer.num_branched += len(grown.leaves) > 1
        return grown

    def observe(self, emitted: Sequence[int]) -> None:
        self.ids += emitted
