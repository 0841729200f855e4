"""Every seam of omnidraft: the Protocols, and the few dataclasses that cross them. Read this first.

Letters: p is the target's distribution over its vocabulary V_p, q the drafter's over V_q.
Shapes: N nodes of a tree (node 0 is the last emitted token), V a vocabulary, K the top-k kept for traces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch

from omnidraft.snapshots.manifest import Manifest
from omnidraft.traces.record import Beliefs

Mode = Literal["fast", "reproducible"]
Offsets = Mapping[int, int]
"""Partition -> offset of the next message to read."""
Odds = Callable[[float], float]
"""log q of a guess -> the chance that the target draws it, given all that stands before it."""


# ---------------------------------------------------------------- decoding


class Source(StrEnum):
    """Which reading of the draft put a node into the tree."""

    DIRECT = "direct"  # one draft token is one target token
    SPLIT = "split"  # one draft token is several target tokens
    MERGE = "merge"  # several draft tokens are one target token (n-gram cache)
    LOOKUP = "lookup"  # copied from earlier in the text


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
    """The draft tokens on the way to the likeliest text, for the trace."""
    draft_s: float = field(default=0.0, compare=False)
    """Seconds that the drafter computed for it."""
    noise_weight: float | None = field(default=None, compare=False)
    """How much of the target's noise the drafter's guesses looked at, from 0 to 1; None: it guessed nothing."""

    @staticmethod
    def empty(root_token: int) -> "DraftTree":
        """Nothing drafted: plain decoding."""
        return DraftTree((root_token,), (0,), (None,), (0.0,))

    @staticmethod
    def chain(
        root_token: int,
        tokens: Sequence[int],
        sources: Sequence[Source],
        log_q: Sequence[float],
        draft_ids: Sequence[int] = (),
    ) -> "DraftTree":
        """A tree without branches."""
        return DraftTree(
            (root_token, *tokens), (0, *range(len(tokens))), (None, *sources), (0.0, *log_q), tuple(draft_ids)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that is `token`, or None when nobody drafted it."""
        for candidate in range(node + 1, len(self.tokens)):
            if self.parents[candidate] == node and self.tokens[candidate] == token:
                return candidate
        return None

    @property
    def is_chain(self) -> bool:
        return all(parent == max(node - 1, 0) for node, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Drafted nodes on the path to each node, itself included; 0 for the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def leaves(self) -> tuple[int, ...]:
        """Drafted nodes that nothing follows."""
        inner = set(self.parents[1:])
        return tuple(node for node in range(1, len(self)) if node not in inner)

    def fits(self, limits: "TreeLimits") -> bool:
        return (
            len(self) - 1 <= limits.num_nodes
            and (limits.num_chains is None or len(self.leaves) <= limits.num_chains)
            and (limits.depth is None or max(self.depths) <= limits.depth)
        )


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole text must match."""

    kind: Literal["json_schema", "regex"]
    text: str
    compiled: object | None = field(default=None, compare=False, repr=False)
    """What decode/grammar.py made of it; None: it is compiled when decoding begins."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's distribution is shaped before a draw, in this order: penalties, bias, grammar, temperature,
    top-k, top-p, min-p."""

    temperature: float = 0.0
    """0 takes the most probable token, lowest id on a tie."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    """Tokens less probable than this share of the most probable one are left out."""
    repetition_penalty: float = 1.0
    """Positive logits of ids in prompt or answer are divided by it, others multiplied."""
    presence_penalty: float = 0.0
    """Taken off the logit of every id of the answer."""
    frequency_penalty: float = 0.0
    """The same, for each time it was said."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids."""
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One text to be decoded."""

    prompt_ids: tuple[int, ...]
    """The target's ids."""
    drafter_prompt_ids: tuple[int, ...]
    """The same prompt in the drafter's own template and ids; they are never derived from the target's."""
    max_new_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    choice: int = 0
    """Index of the answer among those asked for; answers of one seed differ by it."""
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[bytes, ...] = ()
    mode: Mode = "reproducible"
    num_draft_tokens: int = 5
    """0 is plain decoding."""
    tenant: str = "default"
    """Whose it is: drafting may pay for one's texts and not for another's."""
    num_log_probs: int | None = None
    """How many of the likeliest ids to tell with each emitted one; None tells nothing."""


class FinishReason(StrEnum):
    """Why a text ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one step, by what they were spent on."""

    draft_s: float = 0.0
    """The drafter's own computing."""
    target_s: float = 0.0
    other_s: float = 0.0
    """Translation, tree building, drawing, bookkeeping."""


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Natural logs of the target's raw probabilities, before anything that the request's sampling does to them."""

    emitted: tuple[float, ...]
    likeliest: tuple[tuple[tuple[int, float], ...], ...]
    """Where each emitted id stands: ids that could have stood there, most probable first."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass of the target gave."""

    tree: DraftTree
    emitted: tuple[int, ...]
    """Target ids to show, the token that ended the text included."""
    path: tuple[int, ...]
    """Nodes the target's draws went through, the root left out; the last emitted token was drafted by nobody,
    unless the text ended on a drafted one."""
    text: str
    """What these tokens add to the text, complete UTF-8 only; nothing of a stop token or stop string."""
    finish_reason: FinishReason | None
    timings: Timings
    beliefs: Beliefs | None
    """None when nobody asked for traces."""
    log_probs: LogProbs | None = None
    """None unless the request asked for them."""


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Which trees a target takes, the root not counted."""

    num_nodes: int
    num_chains: int | None = None
    """Leaves at most; 1 takes chains only, None any number."""
    depth: int | None = None
    """Nodes on a path from the root at most; None any number."""


class TargetSession(Protocol):
    """One request's keys and values inside the target. Not shared between threads."""

    def score(self, tree: DraftTree) -> torch.Tensor:
        """Raw logits float32 [N, V] after each node, in order, no NaN or +inf. Kept ids plus tree fit the capacity."""

    def keep(self, nodes: Sequence[int]) -> None:
        """After `score`: the ids of these nodes (root first, each the parent of the next) become part of the
        text; the keys of all other nodes are dropped."""

    def close(self) -> None:
        """Free the memory. Nothing may be called afterwards; closing twice is allowed."""


class Target(Protocol):
    """The model whose distribution is kept."""

    vocab_size: int
    context_limit: int
    """Ids of prompt and answer together, at most."""
    fingerprint: str
    """Names everything a text depends on besides prompt, seed and settings: weights, precision, width, threads."""

    def limits(self, mode: Mode) -> TreeLimits:
        """The trees that `score` takes in this mode."""

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> TargetSession:
        """Keys for all of the prompt but its last id, which is the root of the first tree.

        Raises:
            RequestError: empty, or longer than the context limit with max_new_tokens.
        """


class DraftSession(Protocol):
    """One request's keys and values inside the drafter."""

    def advance(self, keep: int, ids: Sequence[int]) -> torch.Tensor:
        """Cut back to the first `keep` ids, add `ids` (at least one), return the logits float32 [V] after the last.

        Ids that follow a branch added since the last call reuse its keys; all other branches are forgotten.
        """

    def branch(self, ids: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """Add one id behind each parent in one pass; returns logits float32 [R, V], a row for each.

        Parent -1 is the last id of the text; any other counts the ids branched since the last `advance`, from 0.
        """

    def odds(self) -> Sequence[Odds] | None:
        """Of the guesses behind each row of the last `advance` or `branch`; None without an acceptance head."""


class DraftModel(Protocol):
    """The small model that proposes, at one set of weights."""

    vocab_size: int
    context_limit: int
    has_head: bool
    """Whether its sessions know `odds`."""

    def open(self) -> DraftSession:
        """A fresh, empty session."""

    def advance_all(self, asked: Sequence[tuple[DraftSession, int, Sequence[int]]]) -> list[torch.Tensor]:
        """`advance` of several sessions, none of them twice, in one pass where the model can."""

    def branch_all(self, asked: Sequence[tuple[DraftSession, Sequence[int], Sequence[int]]]) -> list[torch.Tensor]:
        """The same for `branch`."""


class Noise(Protocol):
    """Everything random about one text: depends on seed, choice and position, on nothing else."""

    def draw(self, ids_M: np.ndarray, p_M: np.ndarray, position: int) -> int:
        """One of these ids, each with its float64 probability, by the exponential race; `position` counts prompt
        ids too. The noise of an id does not depend on which other ids take part."""

    def exponentials(self, position: int, ids: np.ndarray) -> np.ndarray:
        """E of these ids at this position, float64, Exp(1)."""


class ProposerSession(Protocol):
    """Proposals for one request."""

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        """A tree within the limits under the last emitted token; `position` is where the first emitted token will
        stand. Any such tree is allowed, an empty one too."""

    def observe(self, emitted: Sequence[int]) -> None:
        """The target emitted these ids after the last tree."""


class Proposer(Protocol):
    """Who fills the tree. One per snapshot, many sessions."""

    def open(self, request: Request) -> ProposerSession:
        """The request's last prompt id is the first root."""


class Policy(Protocol):
    """How much to draft. Values are estimated chances that the target's text goes through a place or a node."""

    num_candidates: int
    """Guesses that the drafter makes behind each place."""
    asks_head: bool
    """Whether the drafter's guesses have their chances from its acceptance head, where it has one."""

    def begins(self, max_new_tokens: int) -> None:
        """A request's text is next."""

    def reads(self, num_ids: int) -> bool:
        """Whether the drafter drafts in this pass, for which it has to read about so many ids first."""

    def expand(self, values: Sequence[float], num_nodes: int) -> int:
        """How many of these places, falling in value, the drafter goes on from in one step; 0 ends drafting.

        At first there is one place, the text itself; `num_nodes` were drafted so far.
        """

    def keep(self, values: Sequence[float]) -> int:
        """How many of these nodes, best first, the target scores."""

    def saw(self, num_emitted: int, num_nodes: int, step_rows: Sequence[int]) -> None:
        """The last step: what the target scored and emitted, and the rows of each of the drafter's steps."""


# ---------------------------------------------------------------- learning


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Several texts in one pass without padding: first the beginnings of all, which are only read, then the rest."""

    ids_R: torch.Tensor
    """int64, the drafter's."""
    text_R: torch.Tensor
    """int64; which text a row belongs to. Rows of one text see each other only."""
    position_R: torch.Tensor
    """int64; from 0 in each text."""
    num_context: int
    """Rows of the beginnings."""


class TrainableDrafter(Protocol):
    """The drafter as the learner holds it. R rows of a pass, C of them context, N chosen rows, H hidden size, V_q
    vocabulary."""

    vocab_size: int
    context_limit: int

    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters that learn, by name, float32, in a fixed order."""

    def hidden(self, texts: PackedTexts) -> torch.Tensor:
        """Last hidden states [R - C, H] of the rows behind the context, whose keys and values are constants."""

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """float32 [N, V_q] of chosen positions only."""

    def serving_tensors(self) -> dict[str, torch.Tensor]:
        """What a worker needs on top of the base drafter: all weights in bfloat16, or LoRA factors in float32."""


class TrainableHead(Protocol):
    """The acceptance head as the learner holds it. N guesses, H hidden size of the drafter."""

    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """As TrainableDrafter.trained; these names are those in a snapshot, and none is a drafter's."""

    def logits(self, hidden_NH: torch.Tensor, log_q_N: torch.Tensor) -> torch.Tensor:
        """float32 [N], of the chance that a guess is accepted: behind which hidden state, with which log q."""


# ---------------------------------------------------------------- logs


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for a log."""

    key: bytes
    value: bytes
    headers: Mapping[str, bytes] = field(default_factory=dict)
    partition: int | None = None
    """None: the one that its key belongs to."""


DamageReason = Literal["malformed_record", "malformed_batch", "corrupt_batch", "missing"]
"""A client wrote it so (the first two), or the log's storage spoiled it."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a log cannot give what stands at some of its offsets."""

    reason: DamageReason
    error: str
    num_messages: int = 1
    """Offsets that are lost together, beginning with the message's own."""
    is_raw: bool = True
    """Whether the value is how the bytes lie in the log; else key, value and `headers` are what the client wrote."""
    headers: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a log, or what is left of some."""

    partition: int
    offset: int
    key: bytes
    value: bytes
    headers: Mapping[str, bytes]
    """Empty when it is damaged, so that nobody takes it for a sound one."""
    timestamp_ms: int
    damage: Damage | None = None

    @property
    def next_offset(self) -> int:
        return self.offset + (1 if self.damage is None else self.damage.num_messages)


@dataclass(frozen=True, slots=True)
class Polled:
    """Messages in offset order within each partition, and where to read on. Every offset that is passed has a message,
    unless the log used it for itself (Kafka's transaction markers)."""

    messages: tuple[Message, ...]
    next_offsets: Offsets
    """For every partition that moved in this poll."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic as its log describes it, asked without changing anything."""

    num_partitions: int
    max_message_bytes: int | None = None
    """None: no limit."""
    retention_ms: int | None = None
    """None: kept for ever."""
    stamped_by: Literal["writer", "log"] = "writer"
    """Whose clock a message's timestamp is."""


class LogWriter(Protocol):
    """The writing end of one topic. One thread at a time."""

    def append(self, messages: Sequence[Outgoing]) -> None:
        """Returns when all are acknowledged, in order per key.

        Raises:
            BusError: refused or timed out; some of the messages may be in the log, and the caller may append again.
        """

    def close(self) -> None: ...


class LogReader(Protocol):
    """The reading end of one topic: all its partitions, at offsets that the caller keeps. One thread at a time.

    No content of a topic stops it: what cannot be given whole is a message with `damage`.
    """

    def partitions(self) -> tuple[int, ...]:
        """Those that are read. One that is added to the topic is read from its first message on, and counted here."""

    def seek(self, offsets: Offsets) -> None:
        """Read on from here; partitions that are not named start at their first message.

        Raises:
            OffsetOutOfRange: an offset lies outside the log (retention passed it).
        """

    def seek_back(self, num_messages: int) -> None:
        """Read on from so many messages before the end of every partition, or from the first that is still there."""

    def poll(self, max_messages: int, timeout_s: float) -> Polled:
        """Up to `max_messages`; fewer, or none, when the timeout passes first. A poll may return fewer than there are.

        Raises:
            BusError: the log cannot be read; polling again may succeed.
            OffsetOutOfRange: what comes next is gone; polling again says so again, until somebody seeks.
        """

    def first_offsets(self) -> Offsets:
        """Of the oldest message of every partition that is still there; the end offset where there is none."""

    def identity(self) -> str:
        """Names this topic for as long as it exists; one that is created anew under the same name has another."""

    def end_offsets(self) -> Offsets:
        """One past the last message of every partition: lag is this minus where one reads."""

    def close(self) -> None: ...


# ---------------------------------------------------------------- snapshots


@dataclass(frozen=True, slots=True)
class SnapshotVersion:
    """A snapshot as the registry knows it."""

    version: int
    manifest: Manifest
    aliases: tuple[str, ...]
    created_ms: int


class Registry(Protocol):
    """Versions and aliases of the snapshots of one (drafter, target) pair. Safe for several processes."""

    def publish(self, bundle: Path, parent: int | None) -> SnapshotVersion:
        """Add a snapshot folder as the next version and point `challenger` at it. `parent` is the newest version that
        the publisher knows.

        Raises:
            SnapshotStale: somebody published since.
            SnapshotCorrupt: a file of the bundle does not match its manifest.
            RegistryError: refused or cannot be reached.
        """

    def versions(self) -> tuple[SnapshotVersion, ...]:
        """All, oldest first."""

    def resolve(self, name: str) -> SnapshotVersion:
        """By alias (champion, challenger, previous), `latest` or version number. Raises SnapshotNotFound."""

    def fetch(self, version: int, into: Path, parts: Sequence[str] = ("serving",)) -> Path:
        """A local snapshot folder with these parts, checksums verified. Raises SnapshotNotFound, SnapshotCorrupt."""

    def promote(self, version: int) -> None:
        """`champion` moves here, and `previous` to where it was; a challenger that became champion is no longer
        `challenger`, so that a rollback is not undone. Promoting the champion again moves nothing. It is the operator's
        word: every fence from before it is void."""

    def fence(self) -> str:
        """Changes whenever an operator promotes and whenever the champion becomes another. It is taken before what a
        decision rests on is read."""

    def promote_unless_changed(self, version: int, fence: str) -> None:
        """As `promote`, for a decision that was made since this fence was taken.

        Raises:
            SnapshotStale: an operator promoted since, or the champion is another; the decision is void.
        """

    def annotate(self, version: int, notes: Mapping[str, str]) -> None:
        """Short texts shown beside this version, for example why it was promoted; the last one of a name holds."""

    def log_metrics(self, version: int, metrics: Mapping[str, float], step: int) -> None:
        """A point of each curve of this version."""

    def log_file(self, version: int, path: Path) -> None:
        """A picture or report that belongs to this version."""


AnnouncementKind = Literal["champion", "canary", "pause", "resume", "restart", "drift", "drift_over", "best"]


@dataclass(frozen=True, slots=True)
class Announcement:
    """What one process tells all others over the control log; of those about one thing the highest sequence holds."""

    sequence: int
    """The offset of this message in the control log."""
    kind: AnnouncementKind
    version: int | None = None
    target: str | None = None
    """Of the pair it is about; a message that names neither target nor drafter is about every pair."""
    drafter: str | None = None
    share: float | None = None
    """Of the requests, that a canary serves."""
    tenant: str | None = None
    """Whose traffic changed."""
    reason: str | None = None
    """For people."""
    start: str | None = None
    """Where learning goes on: `earliest`, `latest`, or offsets such as `0:120 1:96`."""
    restart_id: str | None = None
    """Names one restart, so that nobody does it twice."""
    fence: str | None = None
    """Of the registry, from before the version was chosen; see Registry.fence."""


# ---------------------------------------------------------------- telemetry


class Metrics(Protocol):
    """Counters and distributions; names end in their unit. Never raises."""

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None: ...

    def observe(self, name: str, value: float, **labels: str) -> None: ...

    def set(self, name: str, value: float, **labels: str) -> None: ...


class Span(Protocol):
    """One piece of work under way. Any thread may end it, once; what is not ended is never told. Never raises."""

    @property
    def context(self) -> str | None:
        """The W3C traceparent that names it to those who go on from it; None: there is nothing to go on from."""

    def end(self, **facts: str | float | bool) -> None:
        """The fact `error` says what went wrong, if anything did."""


class Tracing(Protocol):
    """Where spans go. Nobody waits for it: what it cannot get rid of is dropped. Never raises."""

    is_on: bool
    """Whether anybody sees the spans; those that are many are begun only then."""

    def begin(
        self,
        name: str,
        *,
        parent: str | None = None,
        links: Sequence[str] = (),
        ago_s: float = 0.0,
        **facts: str | float | bool,
    ) -> Span:
        """`parent` and `links` are contexts; without a parent a trace begins. `ago_s` seconds ago it began."""

    def close(self, timeout_s: float) -> None:
        """Tell what waits, at most for so long. Nothing may be begun afterwards."""


@dataclass(frozen=True, slots=True)
class Untold:
    """A Span that nobody sees: whoever goes on from it goes on from what came before."""

    context: str | None

    def end(self, **facts: str | float | bool) -> None: ...


class Untraced:
    """The Tracing of a process that is not traced."""

    is_on = False

    def begin(self, name: str, *, parent: str | None = None, **_: object) -> Untold:
        return Untold(parent)

    def close(self, timeout_s: float) -> None: ...
