"""What followed the last few tokens the last time they stood in this request: copied text costs no drafter.

Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from collections.abc import Sequence

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, GuessKind
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.ports import Noise, Policy, Request, Source, TreeLimits

_LONGEST, _SHORTEST = 4, 2
"""Tokens that have to be the same."""
_MOST_COPIED = 10
_PRIOR = 0.3


class PromptLookup:
    """Implements tree.Contributor."""

    def open(self, request: Request, table: AcceptanceCalibrator, policy: Policy) -> "PromptLookupSession":
        """See tree.Contributor."""
        return PromptLookupSession(request.prompt_ids, table)


class PromptLookupSession:
    """Implements tree.DraftSourceSession."""

    def __init__(self, prompt_ids: Sequence[int], table: AcceptanceCalibrator) -> None:
        self._table = table
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._add(prompt_ids)

    def extend(self, tree: DraftTreeBuilder, position: int, limits: TreeLimits, noise: Noise) -> None:
        """See tree.DraftSourceSession."""
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            start = self._after.get(tuple(self._ids[-length:]))
            if start is not None and start < len(self._ids):
                self._copy(tree, self._ids[start : start + _MOST_COPIED], length)
                return

    def observe(self, emitted: Sequence[int], reached: Sequence[tuple[int, int]]) -> None:
        """See tree.DraftSourceSession."""
        self._add(emitted)

    def _copy(self, tree: DraftTreeBuilder, ids: Sequence[int], length: int) -> None:
        node: int | None = 0
        kind = GuessKind(Source.LOOKUP, _LONGEST - length)
        for token in ids:
            if node is None:
                return
            chance = self._table.chance(kind, _PRIOR, tree.nodes[node].depth + 1)
            node = tree.add(node, token, Source.LOOKUP, chance, guess=(kind, _PRIOR))

    def _add(self, ids: Sequence[int]) -> None:
        """Remember, for the tokens before each new one, that it followed; the last time wins."""
        for token in ids:
            for length in range(_SHORTEST, min(_LONGEST, len(self._ids)) + 1):
                self._after[tuple(self._ids[-length:])] = len(self._ids)
            self._ids.append(token)
