"""Random trees that fit a target's limits, with a known text planted along one of their paths."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from omnidraft.ports import DraftTree, Noise, Proposer, ProposerSession, Request, TreeLimits
from tests.unit.decode.toys import tree


def random_tree(
    rng: np.random.Generator, root: int, true_ids: Sequence[int], limits: TreeLimits, vocab_size: int
) -> DraftTree:
    """Add nodes at random positions while the tree fits; most that can be on the true path are."""
    draft, on_path = DraftTree.empty(root), {0}
    for _ in range(int(rng.integers(2 * limits.num_nodes + 1))):
        parent = int(rng.integers(len(draft)))
        depth = draft.depths[parent]
        is_true = parent in on_path and depth < len(true_ids) and rng.random() < 0.6
        token = true_ids[depth] if is_true else int(rng.integers(vocab_size))
        larger = tree([*draft.tokens, token], [*draft.parents, parent])
        if larger.fits(limits) and draft.child(parent, token) is None:
            on_path |= {len(draft)} if is_true else set()
            draft = larger
    return draft


def true_path(draft: DraftTree, true_ids: Sequence[int]) -> list[int]:
    """Return the nodes that spell the text, the root first."""
    nodes = [0]
    for token in true_ids:
        child = draft.child(nodes[-1], token)
        if child is None:
            break
        nodes.append(child)
    return nodes


@dataclass
class OracleProposer(Proposer):
    """A proposer that knows the text and hides it among wrong branches."""

    text: Sequence[int]
    limits: TreeLimits
    vocab_size: int
    seed: int
    num_branched: int = 0
    """Number of its trees with several chains."""

    def open(self, request: Request) -> "_Session":
        return _Session(self, np.random.default_rng(self.seed), [request.prompt_ids[-1]])


@dataclass
class _Session(ProposerSession):
    proposer: OracleProposer
    rng: np.random.Generator
    ids: list[int] = field(default_factory=list)

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        own = self.proposer.limits
        fitting = replace(own, num_nodes=min(limits.num_nodes, own.num_nodes))
        text = self.proposer.text[len(self.ids) - 1 :]
        draft = random_tree(self.rng, self.ids[-1], text, fitting, self.proposer.vocab_size)
        self.proposer.num_branched += len(draft.leaves) > 1
        return draft

    def observe(self, emitted: Sequence[int]) -> None:
        self.ids += emitted
