"""Decoding: target, drafter, proposer, policy, noise, and what crosses between them.

Letters: p is the target's distribution over its vocabulary V_p, q the drafter's over V_q.
Shapes: N nodes of a tree (node 0 is the last emitted token), V a vocabulary, K the top-k kept for traces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from omnidraft.config import Mode
from omnidraft.ports.draft_tree import DraftTree, TreeLimits
from omnidraft.traces.record import FinishReason, TargetLogprobs

AcceptanceFn = Callable[[float], float]
"""log q of a guess -> the chance that the target draws it, given all that stands before it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole text must match."""

    kind: Literal["json_schema", "regex"]
    text: str
    compiled: object | None = field(default=None, compare=False, repr=False)
    """What decode/sampling/grammar.py made of it; None: it is compiled when decoding begins."""


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
    target_logprobs: TargetLogprobs | None
    """None when nobody asked for traces."""
    log_probs: LogProbs | None = None
    """None unless the request asked for them."""


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

    def acceptance_probabilities(self) -> Sequence[AcceptanceFn] | None:
        """Of the guesses behind each row of the last `advance` or `branch`; None without an acceptance head."""


class DraftModel(Protocol):
    """The small model that proposes, at one set of weights."""

    vocab_size: int
    context_limit: int
    has_head: bool
    """Whether its sessions know `odds`."""

    def open(self) -> DraftSession:
        """A fresh, empty session."""

    def advance_all(self, requests: Sequence[tuple[DraftSession, int, Sequence[int]]]) -> list[torch.Tensor]:
        """`advance` of several sessions, none of them twice, in one pass where the model can."""

    def branch_all(self, requests: Sequence[tuple[DraftSession, Sequence[int], Sequence[int]]]) -> list[torch.Tensor]:
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
    uses_acceptance_head: bool
    """Whether the drafter's guesses have their chances from its acceptance head, where it has one."""

    def start(self, max_new_tokens: int) -> None:
        """A request's text is next."""

    def should_draft(self, num_ids: int) -> bool:
        """Whether the drafter drafts in this pass, for which it has to read about so many ids first."""

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """How many of these places, falling in value, the drafter goes on from in one step; 0 ends drafting.

        At first there is one place, the text itself; `num_nodes` were drafted so far.
        """

    def prune(self, values: Sequence[float]) -> int:
        """How many of these nodes, best first, the target scores."""

    def update(self, num_emitted: int, num_nodes: int, step_rows: Sequence[int]) -> None:
        """The last step: what the target scored and emitted, and the rows of each of the drafter's steps."""
