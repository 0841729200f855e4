"""What a worker tells the learner: up to `segment_tokens` emitted tokens of one request, and what the target believed.

Shapes: E emitted target tokens of this segment, K log-probabilities kept, R rounds (target passes),
M drafted nodes of all rounds together (roots left out), D draft tokens of all rounds together.
Ids are vocabulary ids; log-probabilities are natural logs, raw (temperature 1, before processors).
codec.py turns records into bytes and back.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class Source(StrEnum):
    """The way in which a node got into the draft tree."""

    DIRECT = "direct"  # one draft token is one target token
    SPLIT = "split"  # one draft token is several target tokens
    MERGE = "merge"  # several draft tokens are one target token (n-gram cache)
    LOOKUP = "lookup"  # copied from earlier in the text


class FinishReason(StrEnum):
    """The reason why a text ended."""

    STOP = "stop"
    LENGTH = "length"


SOURCES = tuple(Source)
"""The sources by their number in `Rounds.sources_M`."""


@dataclass(frozen=True, slots=True)
class TargetLogprobs:
    """The target's distribution at each emitted position, as far as it is kept."""

    top_ids_EK: np.ndarray  # uint32, most probable first
    top_log_p_EK: np.ndarray  # float16
    emitted_log_p_E: np.ndarray  # float16
    tail_log_p_E: np.ndarray
    """float16; log of the probability outside the K kept, by logsumexp; -inf when nothing is outside."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """What was drafted and what came of it."""

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


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """Self-contained: a learner needs no other record and no target model to learn from it."""

    request_id: str
    segment: int
    """0 for a request's first."""
    time_ms: int
    """When the segment ended, Unix milliseconds."""
    tenant: str
    worker: str
    target: str
    drafter: str
    snapshot_version: int | None
    """Snapshot that drafted it; None for recorded traffic without a drafter."""
    alignment: str
    """Fingerprint of the vocabulary pair; a learner for another pair must refuse the record."""
    drafter_prompt_ids: np.ndarray
    """uint32; the drafter's own template, as served. Of prompt and answer together the drafter read the last that its
    context held; empty where it could not read the prompt."""
    prompt_ids: np.ndarray  # uint32, the target's
    before_ids: np.ndarray
    """uint32; target ids this answer emitted before the segment, the newest `window_tokens` of them."""
    emitted_ids: np.ndarray  # uint32 [E], E >= 1
    beliefs: TargetLogprobs | None
    """None when the target gives no log-probabilities."""
    rounds: Rounds
    finish_reason: str | None
    """stop or length when the answer ends with this segment, else None."""
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
    """Largest share of the target's noise that a guess of this segment looked at (w of algorithms.md section 3); None
    where the drafter guessed nothing, or the record does not say."""
    has_settings: bool = True
    """False: the engine told nobody how the request was to be decoded; mode, temperature, seed and the other settings
    in here are placeholders."""

    @property
    def is_drawn_from_logprobs(self) -> bool:
        """Whether temperature, top-k, top-p and min-p are all that lies between the raw log-probabilities and the
        distribution that was drawn from; what penalties, bias and grammars did to it is not recorded."""
        has_penalty = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return self.has_settings and not (has_penalty or self.has_logit_bias or self.has_grammar)
