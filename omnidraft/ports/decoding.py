"""Decoding: the request of a text, how its tokens are drawn, and the step that a pass of the target makes.

Shapes: V a vocabulary, M the ids that a token is drawn from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from omnidraft.config import Mode
from omnidraft.params import Sampling
from omnidraft.ports.target import DraftTree
from omnidraft.traces.record import FinishReason, TargetLogprobs
from omnidraft.vocab.thoughts import Thoughts

PREDICTION_DRAFT_TOKENS = 63
"""The limit of a step where a client predicts the answer: with the last emitted token a pass of 64 rows."""

Work = Literal["text", "constrained", "tools"]
"""Kinds of requests, which are drafted for with different success: free text, text under a grammar, tool calls."""


def recorded_work(*, has_grammar: bool) -> Work:
    """Return the kind of a request that its trace records tell: there calls of tools are text under a grammar too."""
    return "constrained" if has_grammar else "text"


@dataclass(frozen=True, slots=True)
class Request:
    """One text to decode."""

    prompt_ids: tuple[int, ...]
    """The target's ids."""
    drafter_prompt_ids: tuple[int, ...]
    """The same prompt in the drafter's own template and ids; they are never derived from the target's."""
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    choice: int = 0
    """The index of the answer among the `n` of a request; answers of one seed differ by it."""
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[bytes, ...] = ()
    mode: Mode = "reproducible"
    num_draft_tokens: int = 5
    """0 is plain decoding."""
    num_memory_tokens: int = 0
    """The limit where a memory of earlier texts drafts, if it is the larger one."""
    tenant: str = "default"
    """The tenant that sent it: drafting may pay off for one tenant's texts and not for another's."""
    is_stored: bool = True
    """False: nothing is learned from it, and no later text drafts from it."""
    num_log_probs: int | None = None
    """The number of most probable ids reported with each emitted one; None reports no log-probabilities."""
    drafter_prompt_tail: tuple[int, ...] = ()
    """The target's ids at the end of the prompt, where the drafter reads them as it reads the answer, after its own
    prompt ids."""
    cache_scope: str | None = None
    """Texts of one scope may reuse each other's drafter keys; None: those of one tenant."""
    is_forgotten: bool = False
    """Whether all texts were to be forgotten while this one ran: it leaves no keys behind."""
    has_tools: bool = False
    """Whether the answer may call tools."""
    min_new_tokens: int = 0
    """No id of `stop_ids` is drawn before so many others."""
    bad_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that the answer never ends with."""
    keeps_stop: bool = False
    """Whether the stop string that ends the answer is part of it."""
    prediction_ids: tuple[int, ...] = ()
    """The client's own prediction of the answer, in the target's ids, which is drafted first."""
    shown_ids: Mapping[int, bytes] = field(default_factory=dict)
    """Ids that spell nothing and whose text is shown nevertheless: markers of tool calls."""

    thoughts: Thoughts | None = None
    """What is known of its thoughts, behind which grammar and stop strings count; None: it has none."""

    @property
    def work(self) -> Work:
        """The kind of this request, by which drafting is measured."""
        if self.has_tools:
            return "tools"
        return "text" if self.sampling.grammar is None else "constrained"

    @property
    def max_draft_tokens(self) -> int:
        """The number of tokens drafted per step at most, whatever drafts them."""
        most = max(self.num_draft_tokens, self.num_memory_tokens)
        return max(most, PREDICTION_DRAFT_TOKENS) if self.prediction_ids and self.num_draft_tokens else most


@dataclass(slots=True)
class Timings:
    """Seconds of one step, by activity; known when its round has ended."""

    draft_s: float = 0.0
    """The drafter's forward passes."""
    target_s: float = 0.0
    other_s: float = 0.0
    """Token mapping, tree building, drawing, bookkeeping."""


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Natural logs of the target's raw probabilities, before any sampling processor."""

    emitted: tuple[float, ...]
    likeliest: tuple[tuple[tuple[int, float], ...], ...]
    """The most probable ids at each emitted position with their log-probabilities, most probable first."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one pass of the target."""

    tree: DraftTree
    emitted: tuple[int, ...]
    """The target ids emitted, the token that ended the text included."""
    path: tuple[int, ...]
    """The accepted nodes, without the root. The last emitted token is not among them, unless the text ended on a
    drafted one."""
    text: str
    """The text that these tokens add, complete UTF-8 only, without stop tokens and stop strings."""
    finish_reason: FinishReason | None
    timings: Timings
    target_logprobs: TargetLogprobs | None
    """None when no trace is recorded."""
    log_probs: LogProbs | None = None
    """None unless the request asked for them."""
    stop_string: str | None = None
    """The stop string that ended the text, if one did."""


class Noise(Protocol):
    """The randomness of one text: a function of seed, choice and position, and of nothing else."""

    def draw(self, ids_M: np.ndarray, p_M: np.ndarray, position: int) -> int:
        """Draw one of these ids, each with its float64 probability, by the exponential race; `position` counts prompt
        ids too. The noise of an id does not depend on the other ids."""

    def exponentials(self, position: int, ids: np.ndarray) -> np.ndarray:
        """Return the Exp(1) variables of these ids at this position, float64."""


class TokenDistributions(Protocol):
    """The distributions that one text is drawn from, asked for in the order of its draws."""

    def distribution(self, logits_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and probabilities of the next draw, given the target's raw logits."""

    def take(self, token: int) -> None:
        """Add the token that was drawn from the last distribution."""


class StopCondition(Protocol):
    """Decides when one text ends, and which part of it may be shown."""

    finish_reason: FinishReason | None
    """None while the text goes on."""
    stop_string: str | None
    """The string that ended it, if one did."""

    def ends(self, token: int) -> bool:
        """Add one emitted token; return whether the text ends with it."""

    def take(self) -> str:
        """Return the text that can be shown now and was not returned before."""
