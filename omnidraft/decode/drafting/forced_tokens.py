"""Forced tokens: what the grammar leaves no choice about is drafted without asking anybody.

Where one token only can be drawn, its acceptance is 1. Where bytes are forced (`headline"` after `{"`), the target may
spell them in several ways; the longest tokens are drafted, with measured acceptance. See docs/algorithms.md section 4.
"""

from collections.abc import Sequence

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, CandidateKind, temperature_bin
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.ports import Request, Source

_PRIOR = 0.95
"""Acceptance of the longest token of forced bytes, before any is measured: models spell as their tokenizers do."""
_MAX_LEAVES = 8
"""Leaves of a tree that are extended."""


class ForcedRuns:
    """Extends one text's trees by runs of forced tokens."""

    def __init__(self, request: Request, calibrator: AcceptanceCalibrator) -> None:
        self._calibrator = calibrator
        self._style = (temperature_bin(request.sampling.temperature), 0.0)

    def extend_leaves(self, tree: DraftTreeBuilder) -> None:
        """Add what is forced after the most probable leaves, whoever drafted them."""
        for leaf in tree.best_leaves(_MAX_LEAVES):
            self.extend(tree, leaf)

    def extend(self, tree: DraftTreeBuilder, node: int) -> list[int]:
        """Add what is forced after this node; return the nodes of the run, each the parent of the next, stop tokens
        not among them."""
        run: list[int] = []
        while tree.constraints is not None:
            ids, is_sure = tree.constraints.forced(tree.tokens_to(node))
            if tree.is_complete(node):
                self._add_ends(tree, node, ids)
                break
            child = self._add(tree, node, ids[0], is_sure, rank=0, prior=_PRIOR) if ids else None
            if child is None:
                break
            node = child
            run.append(node)
        return run

    def _add_ends(self, tree: DraftTreeBuilder, node: int, stop_ids: Sequence[int]) -> None:
        """Add the tokens of which one ends the text."""
        for rank, token in enumerate(stop_ids):
            self._add(tree, node, token, len(stop_ids) == 1, rank=1 + rank, prior=1 / len(stop_ids))

    def _add(
        self, tree: DraftTreeBuilder, node: int, token: int, is_sure: bool, *, rank: int, prior: float
    ) -> int | None:
        if is_sure:
            return tree.add(node, token, Source.FORCED, 1.0)
        kind = CandidateKind(Source.FORCED, rank, self._style)
        acceptance = self._calibrator.estimate(kind, prior, tree.nodes[node].depth + 1)
        return tree.add(node, token, Source.FORCED, acceptance, estimated_from=(kind, prior))
