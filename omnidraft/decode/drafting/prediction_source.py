"""A client's prediction of the answer as a draft source (OpenAI's Predicted Outputs).

The answer is aligned with the prediction token by token, so that drafts go on behind insertions, deletions and changes;
what was drafted rightly and wrongly in this answer decides how far the next rounds trust it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.suffix_source import MatchDrafting
from omnidraft.decode.drafting.tree_proposer import DraftSource, DraftSourceSession
from omnidraft.memory.match import SuffixMatch
from omnidraft.memory.prediction_alignment import PredictionAlignment
from omnidraft.ports import Request, RoundPlan, Source

_MAX_PLACES = 3
"""Places of the prediction from which is drafted at most: behind a change the text may have replaced, inserted or left
out ids."""


@dataclass(frozen=True, slots=True)
class PredictionSource(DraftSource):
    """Drafts for texts that a client predicts."""

    vocab_size: int
    """Ids from here on are never drafted."""

    def open(self, request: Request, calibrator: AcceptanceCalibrator) -> "PredictionSession":
        """See tree_proposer.DraftSource."""
        drafting = MatchDrafting(request, Source.PREDICTION, self.vocab_size, calibrator, behind_changed="predicted")
        return PredictionSession(request, drafting)


class PredictionSession(DraftSourceSession):
    """The places of the prediction that one text may stand at."""

    def __init__(self, request: Request, drafting: MatchDrafting) -> None:
        self._ids = request.prediction_ids
        self._drafting = drafting
        self._alignment = PredictionAlignment(self._ids) if self._ids else None

    def extend(self, draft: DraftTreeBuilder, plan: RoundPlan) -> None:
        """Draft from each place that the text may stand at. Behind a run of equal ids its length tells how sure the
        next one is; behind a change the alignment does."""
        num_nodes = draft.limits.num_nodes
        if self._alignment is not None and num_nodes:
            for place in self._alignment.best(_MAX_PLACES):
                match = SuffixMatch(self._ids, [place.position], place.run, 1)
                known = None if place.run else place.probability
                self._drafting.extend(draft, "predicted" if place.run else "changed", match, num_nodes, known)

    def observe(self, emitted: Sequence[int], reached: Sequence[tuple[int, int]]) -> None:
        """See tree_proposer.DraftSourceSession."""
        if self._alignment is not None:
            self._alignment.append(emitted)
