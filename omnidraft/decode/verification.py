"""Verification: the target draws its own path through the drafted tree.

At every position the target draws its own token, and a draft token is accepted when it is that token. A draw depends on
the target's logits and on the noise, never on the draft, so the text is exact for any tree.
Source: drafter-invariant speculative decoding, Daliri et al., https://arxiv.org/abs/2408.07978; docs/algorithms.md
section 3.
"""

from collections.abc import Callable
from dataclasses import dataclass

from omnidraft.ports import DraftTree


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """The tokens that the target drew in one pass, and the drafted nodes among them."""

    emitted: tuple[int, ...]
    nodes: tuple[int, ...]
    """Accepted nodes in order, without the root."""


def draw_path(tree: DraftTree, draw: Callable[[int, int], int], ends: Callable[[int], bool]) -> AcceptedPath:
    """Return the target's draws, up to and including the first that was not drafted or that ends the text.

    Args:
        draw: (node, index) -> the target's token after this node; index counts this pass's emitted tokens from 0.
        ends: whether the text ends with this token; called once per token, in order.
    """
    emitted: list[int] = []
    nodes: list[int] = []
    node = 0
    while True:
        token = draw(node, len(emitted))
        emitted.append(token)
        child = tree.child(node, token)
        if child is not None:
            nodes.append(child)
        if ends(token) or child is None:  # not drafted, so nothing after it was scored
            return AcceptedPath(tuple(emitted), tuple(nodes))
        node = child
