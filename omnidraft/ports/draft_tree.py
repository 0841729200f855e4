"""The draft tree, which crosses between proposers, policies and targets.

Shapes: N nodes of a tree; node 0 is the last emitted token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from omnidraft.traces.record import Source


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafted target tokens under the last emitted one. Node 0 is that token, and its own parent.

    Siblings have distinct token ids; a parent stands before its children.
    """

    tokens: tuple[int, ...]
    """Target ids; tokens[0] is the last emitted token."""
    parents: tuple[int, ...]
    sources: tuple[Source | None, ...]
    """None for the root only."""
    log_q: tuple[float, ...]
    """Natural log of the drafter's probability of the node given its parent; 0 for the root."""
    draft_ids: tuple[int, ...] = ()
    """The draft tokens on the way to the likeliest text, for the trace."""
    draft_s: float = field(default=0.0, compare=False)
    """Seconds that the drafter computed for it."""
    noise_weight: float | None = field(default=None, compare=False)
    """How much of the target's noise the drafter's guesses looked at, from 0 to 1; None: it guessed nothing."""

    @staticmethod
    def empty(root_token: int) -> "DraftTree":
        """Nothing drafted: plain decoding."""
        return DraftTree((root_token,), (0,), (None,), (0.0,))

    @staticmethod
    def chain(
        root_token: int,
        tokens: Sequence[int],
        sources: Sequence[Source],
        log_q: Sequence[float],
        draft_ids: Sequence[int] = (),
    ) -> "DraftTree":
        """A tree without branches."""
        return DraftTree(
            (root_token, *tokens), (0, *range(len(tokens))), (None, *sources), (0.0, *log_q), tuple(draft_ids)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that is `token`, or None when nobody drafted it."""
        for candidate in range(node + 1, len(self.tokens)):
            if self.parents[candidate] == node and self.tokens[candidate] == token:
                return candidate
        return None

    @property
    def is_chain(self) -> bool:
        return all(parent == max(node - 1, 0) for node, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Drafted nodes on the path to each node, itself included; 0 for the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def leaves(self) -> tuple[int, ...]:
        """Drafted nodes that nothing follows."""
        inner = set(self.parents[1:])
        return tuple(node for node in range(1, len(self)) if node not in inner)

    def fits(self, limits: "TreeLimits") -> bool:
        return (
            len(self) - 1 <= limits.num_nodes
            and (limits.num_chains is None or len(self.leaves) <= limits.num_chains)
            and (limits.depth is None or max(self.depths) <= limits.depth)
        )


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Which trees a target takes, the root not counted."""

    num_nodes: int
    num_chains: int | None = None
    """Leaves at most; 1 takes chains only, None any number."""
    depth: int | None = None
    """Nodes on a path from the root at most; None any number."""
