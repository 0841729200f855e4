"""The rule: the target draws its own path through the drafted tree.

At every position the target draws its own token; drafts only guess it. A draw looks at the target's logits and at the
noise, never at what was drafted, so the text is exact for any tree.
Source: drafter-invariant speculative decoding, Daliri et al., https://arxiv.org/abs/2408.07978.
"""

from collections.abc import Callable
from dataclasses import dataclass

from omnidraft.ports import DraftTree


@dataclass(frozen=True, slots=True)
class Path:
    """The target's own tokens."""

    emitted: tuple[int, ...]
    nodes: tuple[int, ...]
    """Drafted nodes that were drawn, in order; the root is not among them."""


def draw_path(tree: DraftTree, draw: Callable[[int, int], int], ends: Callable[[int], bool]) -> Path:
    """The target's draws, up to the first that nobody drafted or that ends the text.

    Args:
        draw: (node, index) -> the target's token after this node; index counts this pass's emitted tokens from 0.
        ends: whether the text is over with this token; asked once per token, in order.
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
        if ends(token) or child is None:  # nobody drafted it, so nothing behind it was scored
            return Path(tuple(emitted), tuple(nodes))
        node = child
