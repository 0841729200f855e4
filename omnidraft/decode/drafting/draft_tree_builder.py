"""A tree while proposers add to it: every node with the estimated chance that the target's text goes through it."""

from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.decode.drafting.acceptance_stats import GuessKind
from omnidraft.ports import DraftTree, Source, TreeLimits


@dataclass(slots=True)
class Node:
    """One guess."""

    token: int
    parent: int
    depth: int
    source: Source | None
    chance: float
    """That the target draws it, given its parent."""
    log_q: float = 0.0
    guess: tuple[GuessKind, float] | None = None
    """What the chance was estimated from, to be judged later."""


class DraftTreeBuilder:
    """Nodes in the order in which they were added; node 0 is the last emitted token."""

    def __init__(self, root_token: int, max_depth: int) -> None:
        self.nodes = [Node(root_token, 0, 0, None, 1.0)]
        self.draft_ids: tuple[int, ...] = ()
        self.step_rows: list[int] = []
        self.draft_s = 0.0
        self.noise_weight: float | None = None
        self._max_depth = max_depth
        self._children: list[dict[int, int]] = [{}]

    @property
    def num_drafted(self) -> int:
        return len(self.nodes) - 1

    def add(
        self,
        parent: int,
        token: int,
        source: Source,
        chance: float,
        *,
        log_q: float = 0.0,
        guess: tuple[GuessKind, float] | None = None,
    ) -> int | None:
        """The node; the one that is there already when two proposers say the same. None when it would be too deep."""
        known = self._children[parent].get(token)
        if known is not None:
            self.nodes[known].chance = max(self.nodes[known].chance, chance)
            return known
        depth = self.nodes[parent].depth + 1
        if depth > self._max_depth:
            return None
        self.nodes.append(Node(token, parent, depth, source, chance, log_q, guess))
        self._children.append({})
        self._children[parent][token] = self.num_drafted
        return self.num_drafted

    def value(self, node: int) -> float:
        """Chance that the target's text goes through this node."""
        value = 1.0
        while node:
            value *= self.nodes[node].chance
            node = self.nodes[node].parent
        return value

    def open_value(self, node: int) -> float:
        """Chance that it does, and that what comes next has not been guessed."""
        guessed = sum(self.nodes[child].chance for child in self._children[node].values())
        return self.value(node) * max(1.0 - guessed, 0.0)

    def children(self, node: int) -> list[Node]:
        return [self.nodes[child] for child in self._children[node].values()]

    def walk(self, emitted: Sequence[int]) -> list[tuple[int, int]]:
        """The nodes that the emitted text reached, each with the token that came next."""
        reached, node = [], 0
        for token in emitted:
            reached.append((node, token))
            if token not in self._children[node]:
                break
            node = self._children[node][token]
        return reached

    def ranked(self, limits: TreeLimits) -> list[int]:
        """The nodes that fit, best first; every front of this list is a tree that fits."""
        depth = self._max_depth if limits.depth is None else limits.depth
        values = [1.0]
        for node in self.nodes[1:]:
            values.append(values[node.parent] * node.chance)
        fitting = [number for number in range(1, len(self.nodes)) if self.nodes[number].depth <= depth]
        if limits.num_chains is None:
            order = sorted(fitting, key=lambda number: (-values[number], number))
        else:
            order = self._chains(fitting, values, limits.num_chains)
        return order[: limits.num_nodes]

    def cut(self, order: Sequence[int]) -> DraftTree:
        """The tree of these nodes; a parent stands before its children."""
        number_of = {0: 0} | {node: number for number, node in enumerate(order, 1)}
        nodes = [self.nodes[0], *(self.nodes[node] for node in order)]
        return DraftTree(
            tokens=tuple(node.token for node in nodes),
            parents=tuple(number_of[node.parent] for node in nodes),
            sources=tuple(node.source for node in nodes),
            log_q=tuple(node.log_q for node in nodes),
            draft_ids=self.draft_ids,
            draft_s=self.draft_s,
            noise_weight=self.noise_weight,
        )

    def _chains(self, fitting: Sequence[int], values: Sequence[float], num_chains: int) -> list[int]:
        """Chain after chain, each the one that adds the most value to those before."""
        chosen: list[int] = []
        for _ in range(num_chains):
            added = [0.0] * len(self.nodes)
            for node in fitting:
                added[node] = added[self.nodes[node].parent] + (0.0 if node in chosen else values[node])
            leaf = max(fitting, key=lambda node: added[node], default=0)
            if not added[leaf]:
                break
            chosen += [node for node in self._path(leaf) if node not in chosen]
        return chosen

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]
