"""The target, whose distribution is preserved, and the trees of drafted tokens that it scores.

Shapes: N nodes of a tree (node 0 is the last emitted token), V a vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from omnidraft.config import Mode
from omnidraft.errors import ContextExceeded, RequestError
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
    """The draft tokens on the path to the most probable text, for the trace."""
    draft_s: float = field(default=0.0, compare=False)
    """The seconds of the drafter's passes for it."""
    step_rows: tuple[int, ...] = field(default=(), compare=False)
    """Its ids in each of the drafter's passes of the round, the first of which reads texts whose ends come later; empty
    where nothing drafts."""
    noise_weight: float | None = field(default=None, compare=False)
    """The weight of the target's noise in the drafter's guesses, from 0 to 1; None: the drafter guessed nothing."""
    acceptance: tuple[float, ...] = field(default=(), compare=False)
    """The estimated probability that the target draws each node, given its parent; 1 for the root. Empty: nobody
    estimated."""

    @staticmethod
    def empty(root_token: int) -> "DraftTree":
        """Return a tree without drafted nodes: plain decoding."""
        return DraftTree((root_token,), (0,), (None,), (0.0,))

    @staticmethod
    def chain(
        root_token: int,
        tokens: Sequence[int],
        sources: Sequence[Source],
        log_q: Sequence[float],
        draft_ids: Sequence[int] = (),
    ) -> "DraftTree":
        """Return a tree without branches."""
        return DraftTree(
            (root_token, *tokens), (0, *range(len(tokens))), (None, *sources), (0.0, *log_q), tuple(draft_ids)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` with this token, or None when it was not drafted."""
        for candidate in range(node + 1, len(self.tokens)):
            if self.parents[candidate] == node and self.tokens[candidate] == token:
                return candidate
        return None

    def scored_positions(self, path: Sequence[int], num_emitted: int) -> list[tuple[int, bool]]:
        """Return the first-ranked candidate of each scored position of a pass, and whether the target drew it.

        This is the one rule behind every `agreement`. A position is scored when at least one token was drafted there
        and the target drew a token. Siblings stand in the order of their rank, so the first one is the first-ranked.

        Args:
            path: accepted nodes, in order, the root left out.
            num_emitted: tokens that the target drew: one more than `path`, or as many when the text ended on a draft.
        """
        drawn_from = (0, *path)[:num_emitted]
        firsts = (
            next((at for at in range(node + 1, len(self)) if self.parents[at] == node), None) for node in drawn_from
        )
        return [(first, first in path) for first in firsts if first is not None]

    @property
    def is_chain(self) -> bool:
        return all(parent == max(node - 1, 0) for node, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of drafted nodes on the path to each node, itself included; 0 for the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def leaves(self) -> tuple[int, ...]:
        """The drafted nodes without children."""
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
    """Limits of the trees that a target takes, the root not counted."""

    num_nodes: int
    num_chains: int | None = None
    """The maximal number of leaves; 1 takes chains only, None any number."""
    depth: int | None = None
    """The maximal number of nodes on a path from the root; None takes any."""

    @property
    def longest_chain(self) -> int:
        """The maximal number of ids on a path, the root counted."""
        return 1 + min(self.num_nodes, self.depth or self.num_nodes)


class TargetSession(Protocol):
    """One text's KV cache inside the target. Not shared between threads."""

    @property
    def num_kept(self) -> int:
        """The number of ids whose keys are stored."""

    @property
    def num_unread(self) -> int:
        """The number of prompt ids, the last one not counted, whose keys are still to be computed before a tree."""

    def score(self, tree: DraftTree) -> torch.Tensor:
        """Compute what is unread, then return the raw logits float32 [N, V] after each node, in order, without NaN or
        +inf. The kept ids and the tree fit the capacity."""

    def keep(self, nodes: Sequence[int]) -> None:
        """Make the ids of these nodes (root first, each the parent of the next) part of the text, after `score`; drop
        the keys of all other nodes."""

    def close(self) -> None:
        """Free the memory. Nothing may be called afterwards; closing twice is allowed."""


class Target(Protocol):
    """The model whose distribution is preserved."""

    vocab_size: int
    context_limit: int
    """The maximal number of ids of prompt and answer together."""
    first_context: int
    """Texts that grow longer are rotated otherwise from their first id on; the limit where all are rotated alike."""
    fingerprint: str
    """Identifies everything a text depends on besides prompt, seed and settings: weights, precision, width, threads."""
    max_rows: int
    """The number of ids, of all texts together, that `forward` computes in one pass; more take several passes."""

    def limits(self, mode: Mode) -> TreeLimits:
        """Return the limits of the trees that `score` takes in this mode."""

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> TargetSession:
        """Return a session whose prompt is unread; its last id is the root of the first tree.

        Raises:
            RequestError: the prompt is empty, or exceeds the context limit together with max_new_tokens.
        """

    def forward(
        self,
        trees: Sequence[tuple[TargetSession, DraftTree]],
        prompts: Sequence[tuple[TargetSession, int]] = (),
    ) -> list[torch.Tensor]:
        """Compute one pass over the rows of several texts; return the logits float32 [N, V] of each tree, as `score`
        does. The bits of a text in reproducible mode depend neither on the other texts nor on the sizes of chunks.

        Args:
            trees: sessions with nothing unread, each with the tree to score.
            prompts: other sessions, each with the number of further prompt ids whose keys are computed.
        """

    def reuse(self, session: TargetSession, source: TargetSession, num_ids: int) -> int:
        """Copy keys of ids that both texts begin with, `num_ids` of them, into a session that has none yet.

        Returns:
            The number of ids whose keys were copied; fewer where copied keys would differ from computed ones, or where
            the source keeps fewer.
        """

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """Return the memory of the keys and values of a text that has so many ids; it grows with the text."""


def rotation_offset(target: Target, num_ids: int) -> int:
    """Return the first position of a text that grows to so many ids. Those of texts longer than the first context begin
    behind all others, so that both kinds are told apart wherever positions are read."""
    return target.first_context if num_ids > target.first_context else 0


def ids_needed(prompt_ids: Sequence[int], max_new_tokens: int, context_limit: int) -> int:
    """Return the number of ids of prompt and answer together.

    Raises:
        RequestError: the prompt is empty; ContextExceeded: they exceed the context.
    """
    if not prompt_ids:
        raise RequestError("the prompt is empty; give at least one token")
    needed = len(prompt_ids) + max_new_tokens
    if needed > context_limit:
        raise ContextExceeded(len(prompt_ids), max_new_tokens, context_limit)
    return needed
