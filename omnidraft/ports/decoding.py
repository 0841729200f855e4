"""Decoding: target, drafter, noise, and what crosses between them.

Letters: p is the target's distribution over its vocabulary V_p, q the drafter's over V_q.
Shapes: N nodes of a tree (node 0 is the last emitted token), V a vocabulary, K the top-k kept for traces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from omnidraft.config import Mode
from omnidraft.params import Sampling
from omnidraft.ports.draft_tree import DraftTree, TreeLimits
from omnidraft.traces.record import FinishReason, TargetLogprobs

Work = Literal["text", "constrained", "tools"]
"""Kinds of requests, which are drafted for with different success: free text, text under a grammar, tool calls."""

AcceptanceFn = Callable[[float], float]
"""log q of a guess -> the probability that the target accepts it, given that it accepts all before it."""


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
    shown_ids: Mapping[int, bytes] = field(default_factory=dict)
    """Ids that spell nothing and whose text is shown nevertheless: markers of tool calls."""

    @property
    def work(self) -> Work:
        """The kind of this request, by which drafting is measured."""
        if self.has_tools:
            return "tools"
        return "text" if self.sampling.grammar is None else "constrained"

    @property
    def max_draft_tokens(self) -> int:
        """The number of tokens drafted per step at most, whatever drafts them."""
        return max(self.num_draft_tokens, self.num_memory_tokens)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one step, by activity."""

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


class TargetSession(Protocol):
    """One text's KV cache inside the target. Not shared between threads."""

    @property
    def num_kept(self) -> int:
        """The number of ids whose keys are stored."""

    @property
    def num_unread(self) -> int:
        """The number of prompt ids, the last one not counted, whose keys are still to be computed before a tree."""

    def score(self, tree: DraftTree) -> torch.Tensor:
        """Compute what is unread, then return the raw logits float32 [N, V] after each node, in order, without NaN or
        +inf. The kept ids and the tree fit the capacity."""

    def keep(self, nodes: Sequence[int]) -> None:
        """Make the ids of these nodes (root first, each the parent of the next) part of the text, after `score`; drop
        the keys of all other nodes."""

    def close(self) -> None:
        """Free the memory. Nothing may be called afterwards; closing twice is allowed."""


class Target(Protocol):
    """The model whose distribution is preserved."""

    vocab_size: int
    context_limit: int
    """The maximal number of ids of prompt and answer together."""
    fingerprint: str
    """Identifies everything a text depends on besides prompt, seed and settings: weights, precision, width, threads."""
    max_rows: int
    """The number of ids, of all texts together, that `forward` computes in one pass; more take several passes."""

    def limits(self, mode: Mode) -> TreeLimits:
        """Return the limits of the trees that `score` takes in this mode."""

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> TargetSession:
        """Return a session whose prompt is unread; its last id is the root of the first tree.

        Raises:
            RequestError: the prompt is empty, or exceeds the context limit together with max_new_tokens.
        """

    def forward(
        self,
        trees: Sequence[tuple[TargetSession, DraftTree]],
        prompts: Sequence[tuple[TargetSession, int]] = (),
    ) -> list[torch.Tensor]:
        """Compute one pass over the rows of several texts; return the logits float32 [N, V] of each tree, as `score`
        does. The bits of a text in reproducible mode depend neither on the other texts nor on the sizes of chunks.

        Args:
            trees: sessions with nothing unread, each with the tree to score.
            prompts: other sessions, each with the number of further prompt ids whose keys are computed.
        """

    def reuse(self, session: TargetSession, source: TargetSession, num_ids: int) -> int:
        """Copy keys of ids that both texts begin with, `num_ids` of them, into a session that has none yet.

        Returns:
            The number of ids whose keys were copied; fewer where copied keys would differ from computed ones, or where
            the source keeps fewer.
        """

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """Return the memory of the keys and values of a text that has so many ids; it grows with the text."""


class DraftSession(Protocol):
    """One request's KV cache inside the drafter."""

    def prefill_or_extend(self, keep: int, ids: Sequence[int]) -> torch.Tensor:
        """Truncate to the first `keep` ids, append `ids` (at least one), return the logits float32 [V] after the last.

        Ids that follow a branch added since the last call reuse its keys; all other branches are dropped.
        """

    def branch(self, ids: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """Append one id to each parent in one pass; return logits float32 [R, V], one row per id.

        Parent -1 is the last id of the text; any other is the index among the ids branched since the last
        `prefill_or_extend`, those before it in this call included.
        """

    def acceptance_probabilities(self) -> Sequence[AcceptanceFn] | None:
        """Return one function for the guesses after each row of the last `prefill_or_extend` or `branch`; None
        without an acceptance head."""


class DraftModel(Protocol):
    """The small model that drafts, at one set of weights."""

    vocab_size: int
    context_limit: int
    has_head: bool
    """Whether its sessions have `acceptance_probabilities`."""

    def open(self) -> DraftSession:
        """Return a new, empty session."""

    def prefill_or_extend_all(self, requests: Sequence[tuple[DraftSession, int, Sequence[int]]]) -> list[torch.Tensor]:
        """Call `prefill_or_extend` on several distinct sessions, in one pass where the model can batch."""

    def branch_all(self, requests: Sequence[tuple[DraftSession, Sequence[int], Sequence[int]]]) -> list[torch.Tensor]:
        """Call `branch` on several distinct sessions, in one pass where the model can batch."""


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
