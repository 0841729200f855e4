"""A draft tree under construction: every node has the estimated probability that the target's text reaches it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from omnidraft.decode.drafting.acceptance_stats import CandidateKind
from omnidraft.decode.drafting.constraints import DraftConstraints
from omnidraft.ports import DraftTree, Noise, Source, TreeLimits
from omnidraft.traces.record import DRAFTER_SOURCES

_LATER_SHARE = 0.5
"""How much of a token's worth is that drafting can go on behind it."""


@dataclass(slots=True)
class Node:
    """One draft token."""

    token: int
    parent: int
    depth: int
    source: Source | None
    acceptance: float
    """Probability that the target draws it, given its parent."""
    log_q: float = 0.0
    estimates: list[tuple[CandidateKind, float]] = field(default_factory=list)
    """The kinds and q's that its acceptance was estimated from, one for each source that drafted it, for the
    calibrator."""

    @property
    def is_drafters(self) -> bool:
        """Whether no memory and no grammar has drafted it."""
        return self.source in DRAFTER_SOURCES


class DraftTreeBuilder:
    """One text's part of a round. Nodes are in the order in which they were added; node 0 is the last emitted token."""

    def __init__(
        self,
        root_token: int,
        limits: TreeLimits,
        noise: Noise,
        constraints: DraftConstraints | None = None,
        index: int = 0,
        position: int = 0,
    ) -> None:
        """Begin with the root alone.

        Args:
            constraints: refuse tokens that the target cannot draw.
            index: the number of the text in the round's plan.
            position: that of the next emitted token.
        """
        self.limits, self.noise, self.constraints = limits, noise, constraints
        self.index, self.position = index, position
        self.nodes = [Node(root_token, 0, 0, None, 1.0)]
        self.draft_ids: tuple[int, ...] = ()
        self.step_rows: list[int] = []
        self.num_read_before = 0
        """Ids that the drafter read of the text before the round's steps, in which it then has no part."""
        self.draft_s = 0.0
        self.search_s = 0.0
        """Seconds in which the suffix memory was searched."""
        self.noise_weight: float | None = None
        self._max_depth = limits.longest_chain - 1
        self._children: list[dict[int, int]] = [{}]
        self._values = [1.0]
        """The values of the first nodes, as far as they are known."""

    @property
    def num_drafted(self) -> int:
        return len(self.nodes) - 1

    def add(
        self,
        parent: int,
        token: int,
        source: Source,
        acceptance: float,
        *,
        log_q: float = 0.0,
        estimated_from: tuple[CandidateKind, float] | None = None,
    ) -> int | None:
        """Add a node and return its number; the existing one when two sources draft the same token. None when it would
        be too deep, or the target cannot draw it."""
        existing = self._children[parent].get(token)
        if existing is not None:
            self._agree(self.nodes[existing], acceptance, estimated_from)
            return existing
        depth = self.nodes[parent].depth + 1
        if depth > self._max_depth:
            return None
        if self.constraints is not None and not self.constraints.allows(self.tokens_to(parent), token):
            return None
        estimates = [] if estimated_from is None else [estimated_from]
        self.nodes.append(Node(token, parent, depth, source, acceptance, log_q, estimates))
        self._children.append({})
        self._children[parent][token] = node = self.num_drafted
        return node

    def values(self) -> list[float]:
        """Return the value of every node: the probability that the target's text reaches it."""
        values = self._values
        for node in self.nodes[len(values) :]:
            values.append(values[node.parent] * node.acceptance)
        return values

    def later_acceptances(self) -> list[float]:
        """Return the acceptance of every node in a later pass that drafts it without a step of the drafter; 0 where it
        takes one again."""
        return [0.0 if node.source in DRAFTER_SOURCES else node.acceptance for node in self.nodes]

    def best_values(self, num: int) -> list[tuple[float, float]]:
        """Return the largest values of drafted nodes, at most `num`, in falling order, each with its later
        acceptance."""
        return sorted([*zip(self.values(), self.later_acceptances(), strict=True)][1:], reverse=True)[:num]

    def exclude_siblings(self) -> None:
        """Lower the acceptance of a drafter's and a memory's nodes where the other is surer of another token: the
        target draws one. (Two readings of a drafter may be likely side by side, until the target's way is known.)"""
        for numbers in self._children:
            if len(numbers) < 2:
                continue
            siblings = [self.nodes[number] for number in numbers.values()]
            surest = {True: 0.0, False: 0.0}
            for node in siblings:
                surest[node.is_drafters] = max(surest[node.is_drafters], node.acceptance)
            for node in siblings:
                if (other := surest[not node.is_drafters]) > node.acceptance:
                    self._set_acceptance(node, min(node.acceptance, 1.0 - other))

    def open_value(self, node: int) -> float:
        """Return the probability that the text reaches this node and continues with what is not drafted yet."""
        return self.values()[node] * max(1.0 - self._covered(node), 0.0)

    def _covered(self, node: int) -> float:
        """Return how much of what may follow the node is drafted: a child half, and what follows the child the rest,
        since drafting goes on from there."""
        children = self._children[node].values()
        later = [1 - _LATER_SHARE + _LATER_SHARE * self._covered(child) for child in children]
        return sum([self.nodes[child].acceptance * share for child, share in zip(children, later, strict=True)])

    def children(self, node: int) -> list[Node]:
        return [self.nodes[child] for child in self._children[node].values()]

    def tokens_to(self, node: int) -> list[int]:
        """Return the tokens from the root, which is left out, to this node."""
        return [self.nodes[each].token for each in self._path(node)]

    def is_complete(self, node: int) -> bool:
        """Return whether only the end of the text may follow this node."""
        return self.constraints is not None and self.constraints.is_complete(self.tokens_to(node))

    def is_deepest(self, node: int) -> bool:
        """Return whether nothing can be added after this node."""
        return self.nodes[node].depth >= self._max_depth

    def best_leaves(self, num: int) -> list[int]:
        """Return the nodes without children that the target's text most probably reaches, at most `num`."""
        values = self.values()
        leaves = [node for node in range(len(self.nodes)) if not self._children[node]]
        return sorted(leaves, key=lambda node: -values[node])[:num]

    def follow(self, emitted: Sequence[int]) -> list[tuple[int, int]]:
        """Return the nodes that the emitted text reached, each with the token that came next."""
        reached, node = [], 0
        for token in emitted:
            reached.append((node, token))
            if token not in self._children[node]:
                break
            node = self._children[node][token]
        return reached

    def ranked(self) -> list[int]:
        """Return the nodes that fit, best first; every prefix of this list is a tree that fits."""
        values, drafted = self.values(), range(1, len(self.nodes))
        if self.limits.num_chains is None:
            order = sorted(drafted, key=lambda number: -values[number])
        else:
            order = self._chains(drafted, values, self.limits.num_chains)
        return order[: self.limits.num_nodes]

    def build(self, order: Sequence[int]) -> DraftTree:
        """Return the tree of these nodes; a parent stands before its children."""
        number_of = {0: 0} | {node: number for number, node in enumerate(order, 1)}
        nodes = [self.nodes[node] for node in number_of]
        columns = [(node.token, number_of[node.parent], node.source, node.log_q, node.acceptance) for node in nodes]
        tokens, parents, sources, log_q, acceptance = zip(*columns, strict=True)
        return DraftTree(
            tokens,
            parents,
            sources,
            log_q,
            draft_ids=self.draft_ids,
            draft_s=self.draft_s,
            step_rows=(self.num_read_before, *self.step_rows),
            noise_weight=self.noise_weight,
            acceptance=acceptance,
        )

    def _agree(self, node: Node, acceptance: float, estimated_from: tuple[CandidateKind, float] | None) -> None:
        """Account for a further estimate of a node; each kind is calibrated once."""
        self._set_acceptance(node, max(node.acceptance, acceptance))
        if estimated_from is not None and all(estimated_from[0] != kind for kind, _ in node.estimates):
            node.estimates.append(estimated_from)

    def _set_acceptance(self, node: Node, acceptance: float) -> None:
        if acceptance != node.acceptance:
            node.acceptance = acceptance
            del self._values[1:]  # that of the node, and of what follows it

    def _chains(self, fitting: Sequence[int], values: Sequence[float], num_chains: int) -> list[int]:
        """Return chain after chain, each the one that adds the most value to those before it."""
        picked: list[int] = []
        for _ in range(num_chains):
            added = [0.0] * len(self.nodes)
            for node in fitting:
                added[node] = added[self.nodes[node].parent] + (0.0 if node in picked else values[node])
            leaf = max(fitting, key=lambda node: added[node], default=0)
            if not added[leaf]:
                break
            picked += [node for node in self._path(leaf) if node not in picked]
        return picked

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]
