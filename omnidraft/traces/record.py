"""The trace record: up to 256 emitted tokens of one request, with the target's log-probabilities.

Shapes: E emitted target tokens of this segment, K log-probabilities recorded, R rounds (target passes),
M drafted nodes of all rounds together (roots left out), D draft tokens of all rounds together.
Ids are vocabulary ids; log-probabilities are natural logs, raw (temperature 1, before processors).
The classes are the one table of its fields, with types and meanings: schema.py makes the wire format of them, and
codec.py turns records into bytes and back.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import numpy as np

from omnidraft.params import SamplingNumbers
from omnidraft.traces.request_ids import request_of


class Source(StrEnum):
    """The way in which a node got into the draft tree."""

    DIRECT = "direct"  # one draft token is one target token
    SPLIT = "split"  # one draft token is several target tokens
    MERGE = "merge"  # several draft tokens are one target token (n-gram cache)
    LOOKUP = "lookup"  # copied from earlier in the text
    SUFFIX = "suffix"  # followed the same tokens in the text, or in an earlier one of the tenant (suffix memory)
    FORCED = "forced"  # the only token that the grammar allows
    PREDICTION = "prediction"  # the client's own prediction of the answer


class FinishReason(StrEnum):
    """The reason why a text ended."""

    STOP = "stop"
    LENGTH = "length"


SOURCES = tuple(Source)
"""The sources by their number in `Rounds.sources_M`; those from 4 on exist since version 4 of the schema."""
DRAFTER_SOURCES = frozenset({Source.DIRECT, Source.SPLIT, Source.MERGE})
"""The sources of nodes that a drafter model chose."""


SEED_BYTES = 8


# The fields below have their meanings as annotations, behind the Avro or numpy type where Python's does not tell it.
Uint8s = Annotated[np.ndarray, "|u1"]
Uint16s = Annotated[np.ndarray, "<u2"]
Uint32s = Annotated[np.ndarray, "<u4"]
Float16s = Annotated[np.ndarray, "<f2"]
Float32s = Annotated[np.ndarray, "<f4"]


@dataclass(frozen=True, slots=True)
class TargetLogprobs:
    """The K largest log-probabilities of the target at each emitted position."""

    top_ids_EK: Annotated[Uint32s, "row by row, most probable first; K is its length over that of emitted_ids"]
    top_log_p_EK: Annotated[Float16s, "raw log-probability of each of them"]
    emitted_log_p_E: Annotated[Float16s, "of the emitted token"]
    tail_log_p_E: Annotated[
        Float16s, "log of the probability outside the K ids, by logsumexp; -inf when nothing is outside"
    ]


@dataclass(frozen=True, slots=True)
class Rounds:
    """The drafted trees of all rounds, and the nodes that were accepted."""

    num_nodes_R: Annotated[Uint16s, "drafted nodes of each target pass, the root not counted"]
    num_accepted_R: Annotated[Uint16s, "nodes on the target's path"]
    num_emitted_R: Annotated[Uint16s, "emitted tokens; they add up to those of the record"]
    num_draft_ids_R: Annotated[Uint16s, "draft tokens sampled for the tree"]
    node_ids_M: Annotated[Uint32s, "target ids of the drafted nodes, round after round"]
    parents_M: Annotated[Uint16s, "index within the round's tree, where 0 is the root and the first drafted node is 1"]
    sources_M: Annotated[Uint8s, ", ".join(f"{number} {each}" for number, each in enumerate(SOURCES))]
    log_q_M: Annotated[Float16s, "the drafter's log-probability of the node given its parent"]
    accepted_M: Annotated[Uint8s, "1 for nodes on the target's path"]
    draft_ids_D: Annotated[Uint32s, "draft tokens, round after round"]
    draft_s_R: Annotated[Float32s, "seconds spent drafting"]
    target_s_R: Annotated[Float32s, "seconds of the target pass"]

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

    request_id: Annotated[str, "the same for all segments of a request"]
    segment: Annotated[int, "int", "0 for a request's first; (request_id, segment) names a record"]
    time_ms: Annotated[int, "Unix milliseconds at which the segment ended"]
    tenant: Annotated[str, "whose traffic"]
    worker: Annotated[str, "which process"]
    target: Annotated[str, "name of the target"]
    drafter: Annotated[str, "name of the drafter"]
    snapshot_version: Annotated[int | None, "snapshot that drafted; null for recorded traffic without a drafter"]
    alignment: Annotated[str, "fingerprint of the vocabulary pair; a learner for another pair must refuse the record"]
    drafter_prompt_ids: Annotated[
        Uint32s,
        "the prompt in the drafter's own template, as served. The drafter read the last part of prompt and text that "
        "its context holds; empty if it could not read the prompt",
    ]
    prompt_ids: Annotated[Uint32s, "the prompt in the target's ids"]
    before_ids: Annotated[Uint32s, "target ids emitted before the segment, the newest 1,024 of them"]
    emitted_ids: Annotated[Uint32s, "target ids of this segment, at least one"]
    beliefs: Annotated[TargetLogprobs | None, "null when the target gives no log-probabilities"]
    rounds: Annotated[Rounds, "one entry per target pass"]
    finish_reason: Annotated[str | None, "stop or length when the text ends with this segment"]
    mode: Annotated[str, "fast or reproducible"]
    seed: Annotated[int, {"type": "fixed", "name": "Seed", "size": SEED_BYTES}, "unsigned 64 bit, little-endian"]
    traceparent: Annotated[str | None, "W3C trace context of the request"] = None
    has_logit_bias: Annotated[bool, "whether the client moved logits of single ids"] = False
    has_grammar: Annotated[bool, "whether the text had to match a grammar"] = False
    noise_weight: Annotated[
        float | None,
        "largest weight of the target's noise in ranking the drafts of this segment (w of docs/algorithms.md section "
        "4); null where nothing was drafted, or the record does not say",
    ] = None
    has_settings: Annotated[
        bool, "false: the engine did not report the settings of the request; mode, seed and sampling are placeholders"
    ] = True

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
