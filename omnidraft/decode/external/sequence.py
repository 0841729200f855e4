"""A sequence of another engine, and the groups that are drafted for together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from omnidraft.decode.external.batch_drafting import DraftingState
from omnidraft.decode.external.sequence_tracker import TokenBuffer
from omnidraft.decode.recording.record_builder import TraceRecordBuilder
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.ports import DraftTree


@dataclass(slots=True, eq=False)
class ExternalSequence:
    """One running sequence."""

    tokens: TokenBuffer
    snapshot: LoadedSnapshot
    drafting: DraftingState
    record_builder: TraceRecordBuilder | None
    num_prompt: int
    tree: DraftTree = field(default_factory=lambda: DraftTree.empty(0))
    """The draft that the engine received last and is scoring now."""
    draft_s: float = 0.0
    is_suspect: bool = False
    """Whether drafting failed for it and others together; it is drafted for alone until that succeeds."""
    is_disabled: bool = False
    """Whether drafting failed for it alone; it gets no more drafts."""

    def failed(self, *, is_alone: bool) -> None:
        """Drop the draft and the drafter's KV cache after an exception; the cache is computed again if drafting
        continues."""
        self.drafting.release()
        self.tree, self.draft_s = DraftTree.empty(0), 0.0
        self.is_suspect, self.is_disabled = True, is_alone


def draft_groups(seqs: Sequence[ExternalSequence]) -> list[list[ExternalSequence]]:
    """Return the sequences that are drafted for together: those of one snapshot, suspects alone, disabled ones not at
    all."""
    groups: dict[tuple[int, int], list[ExternalSequence]] = {}
    for seq in seqs:
        if not seq.is_disabled:
            alone = id(seq) if seq.is_suspect else 0
            groups.setdefault((id(seq.snapshot.proposer), alone), []).append(seq)
    return list(groups.values())
