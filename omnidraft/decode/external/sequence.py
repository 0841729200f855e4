"""A text of an engine that is not ours, and which texts are drafted for together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from omnidraft.decode.external.batch_drafting import DraftedSequence
from omnidraft.decode.external.sequence_tracker import TokenBuffer
from omnidraft.decode.recording.record_builder import TraceRecordBuilder
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.ports import DraftTree


@dataclass(slots=True, eq=False)
class ExternalSequence:
    """One text under way."""

    tokens: TokenBuffer
    snapshot: LoadedSnapshot
    drafted: DraftedSequence
    tracer: TraceRecordBuilder | None
    num_prompt: int
    tree: DraftTree = field(default_factory=lambda: DraftTree.empty(0))
    """What the engine was given for it last, and scores now."""
    draft_s: float = 0.0
    is_suspect: bool = False
    """Whether drafting failed for it and others together; it is drafted for apart until that worked."""
    is_given_up: bool = False
    """Whether drafting failed for it alone."""

    def failed(self, *, is_alone: bool) -> None:
        """Drafting raised: nothing is drafted, and what the drafter has of it is computed again if it is to draft."""
        self.drafted.release()
        self.tree, self.draft_s = DraftTree.empty(0), 0.0
        self.is_suspect, self.is_given_up = True, is_alone


def groups(texts: Sequence[ExternalSequence]) -> list[list[ExternalSequence]]:
    """Texts that are drafted for together: those of one snapshot, suspects alone, and none that was given up."""
    groups: dict[tuple[int, int], list[ExternalSequence]] = {}
    for text in texts:
        if not text.is_given_up:
            alone = id(text) if text.is_suspect else 0
            groups.setdefault((id(text.snapshot.proposer), alone), []).append(text)
    return list(groups.values())
