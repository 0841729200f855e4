"""A sequence of another engine."""

from dataclasses import dataclass, field

from omnidraft.decode.drafting.safe_drafting import SafeText
from omnidraft.decode.external.sequence_tracker import TokenBuffer
from omnidraft.decode.recording.record_builder import TraceRecordBuilder
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.ports import DraftTree


@dataclass(slots=True, eq=False)
class ExternalSequence:
    """One running sequence."""

    tokens: TokenBuffer
    snapshot: LoadedSnapshot
    drafting: SafeText
    record_builder: TraceRecordBuilder | None
    tree: DraftTree = field(default_factory=lambda: DraftTree.empty(0))
    """The draft that the engine received last and is scoring now."""
