"""The trace record: up to 256 emitted tokens of one request, with the target's log-probabilities.

Shapes: E emitted target tokens of this segment, K log-probabilities recorded, R rounds (target passes),
M drafted nodes of all rounds together (roots left out), D draft tokens of all rounds together.
Ids are vocabulary ids; log-probabilities are natural logs, raw (temperature 1, before processors).
codec.py turns records into bytes and back.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from omnidraft.traces.request_ids import request_of


class Source(StrEnum):
    """The way in which a node got into the draft tree."""

    DIRECT = "direct"  # one draft token is one target token
    SPLIT = "split"  # one draft token is several target tokens
    MERGE = "merge"  # several draft tokens are one target token (n-gram cache)
    LOOKUP = "lookup"  # copied from earlier in the text
    SUFFIX = "suffix"  # followed the same tokens in the text, or in an earlier one of the tenant (suffix memory)
    FORCED = "forced"  # the only token that the grammar allows


class FinishReason(StrEnum):
    """The reason why a text ended."""

    STOP = "stop"
    LENGTH = "length"


SOURCES = tuple(Source)
"""The sources by their number in `Rounds.sources_M`; those from 4 on exist since version 4 of the schema."""
DRAFTER_SOURCES = frozenset({Source.DIRECT, Source.SPLIT, Source.MERGE})
"""The sources of nodes that a drafter model chose."""


@dataclass(frozen=True, slots=True)
class TargetLogprobs:
    """The K largest log-probabilities of the target at each emitted position."""

    top_ids_EK: np.ndarray  # uint32, most probable first
    top_log_p_EK: np.ndarray  # float16
    emitted_log_p_E: np.ndarray  # float16
    tail_log_p_E: np.ndarray
    """float16; log of the probability outside the K ids, by logsumexp; -inf when nothing is outside."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The drafted trees of all rounds, and the nodes that were accepted."""

    num_nodes_R: np.ndarray  # uint16, drafted nodes of each round, the root not counted
    num_accepted_R: np.ndarray  # uint16, nodes on the target's path
    num_emitted_R: np.ndarray  # uint16
    num_draft_ids_R: np.ndarray  # uint16
    node_ids_M: np.ndarray  # uint32, target ids
    parents_M: np.ndarray
    """uint16; index within the round's tree, where 0 is the root and the first drafted node is 1."""
    sources_M: np.ndarray  # uint8, index into SOURCES
    log_q_M: np.ndarray  # float16
    accepted_M: np.ndarray  # uint8, 1 for nodes on the target's path
    draft_ids_D: np.ndarray  # uint32
    draft_s_R: np.ndarray  # float32, seconds
    target_s_R: np.ndarray  # float32, seconds

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


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """A segment of one request. A learner needs no other record and no target model to learn from it."""

    request_id: str
    segment: int
    """0 for a request's first."""
    time_ms: int
    """End of the segment, Unix milliseconds."""
    tenant: str
    worker: str
    target: str
    drafter: str
    snapshot_version: int | None
    """The snapshot that drafted it; None for recorded traffic without a drafter."""
    alignment: str
    """Fingerprint of the vocabulary pair; a learner for another pair must refuse the record."""
    drafter_prompt_ids: np.ndarray
    """uint32; the prompt in the drafter's own template, as served. The drafter read the last part of prompt and text
    that its context holds; empty if it could not read the prompt."""
    prompt_ids: np.ndarray  # uint32, the target's
    before_ids: np.ndarray
    """uint32; target ids emitted before the segment, the newest 1,024 of them."""
    emitted_ids: np.ndarray  # uint32 [E], E >= 1
    beliefs: TargetLogprobs | None
    """None when the target gives no log-probabilities."""
    rounds: Rounds
    finish_reason: str | None
    """stop or length if the text ends with this segment, else None."""
    mode: str
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    traceparent: str | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    has_logit_bias: bool = False
    has_grammar: bool = False
    noise_weight: float | None = None
    """Largest weight of the target's noise in ranking the drafts of this segment (w of docs/algorithms.md section 4);
    None where nothing was drafted, or the record does not say."""
    has_settings: bool = True
    """False: the engine did not report the settings of the request; mode, temperature, seed and the other settings here
    are placeholders."""

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
