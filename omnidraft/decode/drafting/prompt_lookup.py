"""Prompt lookup: drafts the tokens that followed the last few tokens earlier in this request, without a drafter.

Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from collections.abc import Sequence

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, CandidateKind
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.tree_proposer import DraftSource, DraftSourceSession
from omnidraft.ports import Request, RoundPlan, Source

_LONGEST, _SHORTEST = 4, 2
"""Tokens that must match, at most and at least."""
_MOST_COPIED = 10
_MOST_INDEXED = 16_384
"""Ids of a prompt, its last ones, that are indexed: tens of milliseconds, a few MB."""
_PRIOR = 0.3


class PromptLookup(DraftSource):
    """Drafts for texts whose ends occurred in them before."""

    def open(self, request: Request, calibrator: AcceptanceCalibrator) -> "PromptLookupSession":
        """See tree_proposer.DraftSource."""
        return PromptLookupSession(request.prompt_ids, calibrator)


class PromptLookupSession(DraftSourceSession):
    """The places of one text by the tokens before them."""

    def __init__(self, prompt_ids: Sequence[int], calibrator: AcceptanceCalibrator) -> None:
        self._calibrator = calibrator
        self._ids: list[int] = []
        self._next_index: dict[tuple[int, ...], int] = {}
        self._add(prompt_ids[-_MOST_INDEXED:])

    def extend(self, draft: DraftTreeBuilder, plan: RoundPlan) -> None:
        """Copy what followed the longest match of the text's end."""
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            next_index = self._next_index.get(tuple(self._ids[-length:]))
            if next_index is not None and next_index < len(self._ids):
                self._copy(draft, self._ids[next_index : next_index + _MOST_COPIED], length)
                return

    def observe(self, emitted: Sequence[int], reached: Sequence[tuple[int, int]]) -> None:
        """See tree_proposer.DraftSourceSession."""
        self._add(emitted)

    def _copy(self, tree: DraftTreeBuilder, ids: Sequence[int], length: int) -> None:
        node: int | None = 0
        kind = CandidateKind(Source.LOOKUP, _LONGEST - length)
        for token in ids:
            if node is None:
                return
            acceptance = self._calibrator.estimate(kind, _PRIOR, tree.nodes[node].depth + 1)
            node = tree.add(node, token, Source.LOOKUP, acceptance, estimated_from=(kind, _PRIOR))

    def _add(self, ids: Sequence[int]) -> None:
        """Index each new token by the tokens before it; the last occurrence wins."""
        for token in ids:
            for length in range(_SHORTEST, min(_LONGEST, len(self._ids)) + 1):
                self._next_index[tuple(self._ids[-length:])] = len(self._ids)
            self._ids.append(token)
