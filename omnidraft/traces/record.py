"""The trace record: up to 256 emitted tokens of one request, with the target's log-probabilities.

This file is the table of its fields, but for the settings of sampling, which are rows of params.py. An annotation names
a field's Python type, its Avro type (or numpy's type of a column of numbers), the rules that it must pass, and its
meaning. schema.py makes the wire format of it, checks.py the checks; codec.py turns records into bytes and back.

Shapes: E emitted target tokens of this segment, K log-probabilities recorded, R rounds (target passes),
M drafted nodes of all rounds together (roots left out), D draft tokens of all rounds together.
Ids are vocabulary ids; log-probabilities are natural logs, raw (temperature 1, before processors).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import numpy as np

from omnidraft.config import Mode
from omnidraft.params import DEFAULTS, ROWS, SamplingNumbers
from omnidraft.traces.request_ids import request_of

MAX_TENANT_BYTES = 1024
MAX_EMITTED = 4096
MAX_TOP_K = 1024
MAX_ID = (1 << 24) - 1
"""No vocabulary has as many ids; a negative id read as unsigned is larger."""
MAX_INT = (1 << 31) - 1
"""The largest `int` of Avro, whose readers do not check it and whose writers do."""
SEED_BYTES = 8
LOG_P_ROUNDING = 1e-2
"""float16 log-probabilities may lie this far above 0."""


class Source(StrEnum):
    """The way in which a node got into the draft tree."""

    DIRECT = "direct"  # one draft token is one target token
    SPLIT = "split"  # one draft token is several target tokens
    MERGE = "merge"  # several draft tokens are one target token (n-gram cache)
    LOOKUP = "lookup"  # copied from earlier in the text
    SUFFIX = "suffix"  # followed the same tokens in the text, or in an earlier one of the tenant (suffix memory)
    FORCED = "forced"  # the only token that the grammar allows
    PREDICTION = "prediction"  # the client's own prediction of the answer

    __hash__ = str.__hash__  # which knows it: that of enumerations is computed anew, several times a node


class FinishReason(StrEnum):
    """The reason why a text ended."""

    STOP = "stop"
    LENGTH = "length"


STOP_STRING = "stop_string"
"""The reason of a record whose text ended with a stop string, behind which its last id may reach."""
SOURCES = tuple(Source)
"""The sources by their number in `Rounds.sources_M`."""
DRAFTER_SOURCES = frozenset({Source.DIRECT, Source.SPLIT, Source.MERGE})
"""The sources of nodes that a drafter model chose."""


class Rule(NamedTuple):
    """A rule that a field passes unless it is None."""

    is_met: Callable[[Any], bool | np.bool_]
    allowed: str


class Field(NamedTuple):
    """A field of a record, as its annotation says."""

    name: str
    kind: Any  # Avro's type, numpy's type of a packed column, or the class of a nested record
    rules: tuple[Rule, ...]
    doc: str
    is_optional: bool

    @property
    def is_column(self) -> bool:
        """Whether the field is an array, which is packed into bytes."""
        return isinstance(self.kind, np.dtype)


def _fields(record: type) -> tuple[Field, ...]:
    fields, hints = [], get_type_hints(record, include_extras=True)
    for name in record.__annotations__:
        kind, *rules, doc = hints[name].__metadata__
        fields.append(Field(name, kind, tuple(rules), doc, NoneType in get_args(hints[name].__origin__)))
    return (*fields, *(_sampling_fields() if issubclass(record, SamplingNumbers) else ()))


def _sampling_fields() -> Iterator[Field]:
    """Yield the fields of a record that params.py has the table of."""
    for name, row in ROWS.items():
        bounds = row.recorded or row.bounds
        rule = Rule(bounds.allow, str(bounds))
        is_optional = getattr(DEFAULTS, name) is None
        yield Field(name, "int" if bounds.is_integer else "double", (rule,), row.doc, is_optional)


fields_of: Callable[[type], tuple[Field, ...]] = cache(_fields)
"""Return the fields of TraceRecord, TargetLogprobs or Rounds, in the order of the wire."""

_FROM_0 = Rule(lambda number: number >= 0, "from 0")
_SHARE = Rule(lambda number: 0 <= number <= 1, "in [0, 1]")
_AVRO_INT = Rule(lambda number: number <= MAX_INT, f"at most {MAX_INT}")
_TENANT_SIZE = Rule(
    lambda name: len(name.encode("utf-8", "surrogatepass")) <= MAX_TENANT_BYTES, f"at most {MAX_TENANT_BYTES} bytes"
)
_NO_ZERO_BYTE = Rule(lambda name: "\0" not in name, "without a zero byte, which no database of keys can hold")
_EMITTED = Rule(lambda ids: 1 <= len(ids) <= MAX_EMITTED, f"1 to {MAX_EMITTED} ids")
_TOP_K = Rule(lambda ids_EK: 1 <= ids_EK.shape[1] <= MAX_TOP_K, f"1 to {MAX_TOP_K} ids for each token")
_BEST_FIRST = Rule(lambda log_p_EK: (log_p_EK[:, 1:] <= log_p_EK[:, :-1]).all(), "most probable first")


def _one_of(values: tuple[str, ...]) -> Rule:
    return Rule(lambda value: value in values, f"one of {', '.join(values)}")


Name = Annotated[str, "string", Rule(bool, "not empty")]
Flag = Annotated[bool, "boolean"]
Ids = Annotated[
    np.ndarray, np.dtype("<u4"), Rule(lambda ids: not ids.size or ids.max() <= MAX_ID, f"from 0 to {MAX_ID}")
]
Counts = Annotated[np.ndarray, np.dtype("<u2")]
Seconds = Annotated[np.ndarray, np.dtype("<f4"), Rule(lambda s: (np.isfinite(s) & (s >= 0)).all(), "times from 0 up")]
LogProbs = Annotated[
    np.ndarray, np.dtype("<f2"), Rule(lambda log_p: (log_p <= LOG_P_ROUNDING).all(), "log-probabilities up to 0")
]


def _small(limit: int) -> Rule:
    return Rule(lambda numbers: (numbers < limit).all(), f"below {limit}")


@dataclass(frozen=True, slots=True)
class TargetLogprobs:
    """The K largest log-probabilities of the target at each emitted position."""

    top_ids_EK: Annotated[
        Ids, _TOP_K, "uint32, row by row, most probable first; K is its length over that of emitted_ids"
    ]
    top_log_p_EK: Annotated[LogProbs, _BEST_FIRST, "float16, raw log-probability of each of them"]
    emitted_log_p_E: Annotated[LogProbs, "float16, of the emitted token"]
    tail_log_p_E: Annotated[LogProbs, "float16, log of the probability outside the K kept; -inf when nothing is"]


@dataclass(frozen=True, slots=True)
class Rounds:
    """The drafted trees of all rounds, and the nodes that were accepted."""

    num_nodes_R: Annotated[Counts, "uint16, drafted nodes of each target pass, the root not counted"]
    num_accepted_R: Annotated[Counts, "uint16, nodes on the target's path"]
    num_emitted_R: Annotated[Counts, "uint16, emitted tokens; they add up to those of the record"]
    num_draft_ids_R: Annotated[Counts, "uint16, draft tokens sampled for the tree"]
    node_ids_M: Annotated[Ids, "uint32, target ids of the drafted nodes, round after round"]
    parents_M: Annotated[Counts, "uint16, index within the round's tree: 0 is the root, the first drafted node is 1"]
    sources_M: Annotated[
        np.ndarray,
        np.dtype("|u1"),
        _small(len(SOURCES)),
        "uint8: " + ", ".join(f"{number} {each}" for number, each in enumerate(SOURCES)),
    ]
    log_q_M: Annotated[LogProbs, "float16, the drafter's log-probability of the node given its parent"]
    accepted_M: Annotated[np.ndarray, np.dtype("|u1"), _small(2), "uint8, 1 for nodes on the target's path"]
    draft_ids_D: Annotated[Ids, "uint32, draft tokens, round after round"]
    draft_s_R: Annotated[Seconds, "float32, seconds spent drafting"]
    target_s_R: Annotated[Seconds, "float32, seconds of the target pass"]

    @property
    def drafted_by_model(self) -> np.ndarray:
        """bool [M]; whether a drafter model chose the node."""
        is_model_M: np.ndarray = np.isin(self.sources_M, [SOURCES.index(each) for each in DRAFTER_SOURCES])
        return is_model_M

    @property
    def first_agreed(self) -> np.ndarray:
        """bool, one for each round that drafted: whether the target drew the first-ranked candidate at the round's
        first position. The rule is that of ports.DraftTree.scored_positions: a round's first node is that candidate."""
        nodes_R = self.num_nodes_R.astype(np.int64)
        first_R = (np.cumsum(nodes_R) - nodes_R)[nodes_R > 0]
        is_agreed: np.ndarray = self.accepted_M[first_R] == 1
        return is_agreed


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord(SamplingNumbers):
    """A segment of one request. A learner needs no other record and no target model to learn from it."""

    request_id: Annotated[Name, "the same for all segments of a request"]
    segment: Annotated[int, "int", _FROM_0, _AVRO_INT, "0 for a request's first; (request_id, segment) names a record"]
    time_ms: Annotated[int, "long", _FROM_0, "Unix milliseconds at which the segment ended"]
    tenant: Annotated[str, "string", _TENANT_SIZE, _NO_ZERO_BYTE, "whose traffic"]
    worker: Annotated[str, "string", "which process"]
    target: Annotated[Name, "name of the target"]
    drafter: Annotated[Name, "name of the drafter"]
    snapshot_version: Annotated[int | None, "long", _FROM_0, "snapshot that drafted; null without a drafter"]
    alignment: Annotated[Name, "fingerprint of the vocabulary pair"]
    """A learner for another pair must refuse the record."""
    drafter_prompt_ids: Annotated[Ids, "uint32, the prompt in the drafter's own template, as served"]
    """The drafter read the last part of prompt and text that its context holds; empty if it could not read the prompt.
    """
    prompt_ids: Annotated[Ids, "uint32, the prompt in the target's ids"]
    before_ids: Annotated[Ids, "uint32, target ids emitted before this segment, the newest of them"]
    """At most 1,024."""
    emitted_ids: Annotated[Ids, _EMITTED, "uint32, target ids of this segment, at least one"]
    beliefs: Annotated[TargetLogprobs | None, TargetLogprobs, "null when the target gives no log-probabilities"]
    rounds: Annotated[Rounds, Rounds, "one entry per target pass"]
    finish_reason: Annotated[
        str | None,
        "string",
        _one_of((*FinishReason, STOP_STRING)),
        "stop, stop_string or length when the answer ends here",
    ]
    mode: Annotated[str, "string", _one_of(get_args(Mode)), "fast or reproducible"]
    seed: Annotated[
        int,
        {"type": "fixed", "name": "Seed", "size": SEED_BYTES},
        Rule(lambda seed: 0 <= seed < 1 << 8 * SEED_BYTES, f"an unsigned number of {8 * SEED_BYTES} bits"),
        "unsigned 64 bit, little-endian",
    ]
    traceparent: Annotated[str | None, "string", "W3C trace context of the request"] = None
    has_logit_bias: Annotated[Flag, "whether the client moved logits of single ids"] = False
    has_grammar: Annotated[Flag, "whether the text had to match a grammar"] = False
    noise_weight: Annotated[
        float | None, "double", _SHARE, "largest share of the target's noise that a guess looked at, from 0 to 1"
    ] = None
    """w of docs/algorithms.md section 4; None where nothing was drafted, or the record does not say."""
    has_settings: Annotated[Flag, "false: mode, temperature and all that shapes draws are unknown"] = True
    """False: the engine did not report the settings of the request; mode, seed and the numbers of sampling are
    placeholders."""

    @property
    def request(self) -> str:
        """The id of its request, which several answers may have in common."""
        return request_of(self.request_id)

    @property
    def is_drawn_from_logprobs(self) -> bool:
        """Whether the target sampled from the raw log-probabilities after temperature, top-k, top-p and min-p only; the
        effect of penalties, bias and grammars is not recorded."""
        has_penalty = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return self.has_settings and not (has_penalty or self.has_logit_bias or self.has_grammar)
