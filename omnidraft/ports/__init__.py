"""Every seam of omnidraft: the Protocols, and the few dataclasses that cross them. Read this package first."""

from omnidraft.config import Mode
from omnidraft.ports.control import Announcement, AnnouncementFields, AnnouncementKind, Announcer, ControlFollower
from omnidraft.ports.decoding import (
    AcceptanceFn,
    DraftModel,
    DraftSession,
    Grammar,
    LogProbs,
    Noise,
    Request,
    Sampling,
    Step,
    Target,
    TargetSession,
    Timings,
)
from omnidraft.ports.draft_tree import DraftTree, TreeLimits
from omnidraft.ports.drafting import (
    DraftRequest,
    Policy,
    Proposer,
    ProposerSession,
    RoundPlan,
    RoundText,
    TextOutcome,
)
from omnidraft.ports.learning import PackedTexts, TrainableDrafter, TrainableHead
from omnidraft.ports.log import (
    Damage,
    DamageReason,
    LogReader,
    LogWriter,
    Message,
    Offsets,
    Outgoing,
    PollResult,
    TopicFacts,
)
from omnidraft.ports.registry import Registry, SnapshotVersion
from omnidraft.ports.telemetry import Metrics, NoopSpan, NoopTracing, Span, Tracing
from omnidraft.ports.trace_reasons import POISON
from omnidraft.traces.record import FinishReason, Source

__all__ = [
    "POISON",
    "AcceptanceFn",
    "Announcement",
    "AnnouncementFields",
    "AnnouncementKind",
    "Announcer",
    "ControlFollower",
    "Damage",
    "DamageReason",
    "DraftModel",
    "DraftRequest",
    "DraftSession",
    "DraftTree",
    "FinishReason",
    "Grammar",
    "LogProbs",
    "LogReader",
    "LogWriter",
    "Message",
    "Metrics",
    "Mode",
    "Noise",
    "NoopSpan",
    "NoopTracing",
    "Offsets",
    "Outgoing",
    "PackedTexts",
    "Policy",
    "PollResult",
    "Proposer",
    "ProposerSession",
    "Registry",
    "Request",
    "RoundPlan",
    "RoundText",
    "Sampling",
    "SnapshotVersion",
    "Source",
    "Span",
    "Step",
    "Target",
    "TargetSession",
    "TextOutcome",
    "Timings",
    "TopicFacts",
    "Tracing",
    "TrainableDrafter",
    "TrainableHead",
    "TreeLimits",
]
