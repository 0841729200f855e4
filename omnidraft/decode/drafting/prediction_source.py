"""A client's prediction of the answer as a draft source (OpenAI's Predicted Outputs).

The answer is aligned with the prediction token by token, so that drafts go on behind insertions, deletions and changes;
what was drafted rightly and wrongly in this answer decides how far the next rounds trust it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder, TextDraft
from omnidraft.decode.drafting.suffix_source import MatchDrafting
from omnidraft.memory.match import SuffixMatch
from omnidraft.memory.prediction_alignment import PredictionAlignment
from omnidraft.ports import Request, RoundPlan, Source

_MAX_PLACES = 3
"""Places of the prediction from which is drafted at most: behind a change the text may have replaced, inserted or left
out ids."""


@dataclass(frozen=True, slots=True)
class PredictionSource:
    """Implements tree_proposer.DraftSource."""

    vocab_size: int
    """Ids from here on are never drafted."""

    def open(self, request: Request, calibrator: AcceptanceCalibrator) -> "PredictionSession":
        """See tree_proposer.DraftSource."""
        drafting = MatchDrafting.of(request, Source.PREDICTION, "predicted", self.vocab_size, calibrator)
        return PredictionSession(request, drafting)

    def extend_all(self, sessions: Sequence["PredictionSession"], drafts: Sequence[TextDraft], plan: RoundPlan) -> None:
        """See tree_proposer.DraftSource."""
        for session, draft in zip(sessions, drafts, strict=True):
            session.extend(draft.tree, draft.limits.num_nodes)


class PredictionSession:
    """Implements tree_proposer.DraftSourceSession."""

    def __init__(self, request: Request, drafting: MatchDrafting) -> None:
        self._ids = request.prediction_ids
        self._drafting = drafting
        self._alignment = PredictionAlignment(self._ids) if self._ids else None

    def extend(self, tree: DraftTreeBuilder, num_nodes: int) -> None:
        """Add up to `num_nodes` nodes from each place that the text may stand at. Behind a run of equal ids its length
        tells how sure the next one is; behind a change the alignment does."""
        if self._alignment is not None and num_nodes:
            for place in self._alignment.best(_MAX_PLACES):
                match = SuffixMatch(self._ids, [place.position], place.run, 1)
                memory, known = ("predicted", None) if place.run else ("changed", place.probability)
                self._drafting.extend(tree, memory, match, num_nodes, known)

    def observe(self, emitted: Sequence[int], reached: Sequence[tuple[int, int]]) -> None:
        """See tree_proposer.DraftSourceSession."""
        if self._alignment is not None:
            self._alignment.append(emitted)

    def reset(self) -> None:
        """See tree_proposer.DraftSourceSession."""

    def close(self) -> None:
        """See tree_proposer.DraftSourceSession."""
