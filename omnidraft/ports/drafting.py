"""Drafting: the drafter, proposers that draft for the texts of a round, policies that decide how much, and the drafter
inside the learner.

Shapes: V a vocabulary, R rows of a pass, C of them context, N selected rows, H hidden size of the drafter.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from omnidraft.ports.decoding import Noise, Request, Work
from omnidraft.ports.target import DraftTree, TreeLimits
from omnidraft.vocab.alignment import Alignment

AcceptanceFn = Callable[[float], float]
"""log q of a guess -> the probability that the target accepts it, given that it accepts all before it."""

Precision = Literal["float32", "bfloat16"]
"""The number format of training passes; weights are learned in float32 in either."""


class DraftSession(Protocol):
    """One request's KV cache inside the drafter."""

    def prefill_or_extend(self, keep: int, ids: Sequence[int]) -> np.ndarray:
        """Truncate to the first `keep` ids, append `ids` (at least one), return the logits float32 [V] after the last.

        Ids that follow a branch added since the last call reuse its keys; all other branches are dropped.
        """

    def branch(self, ids: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """Append one id to each parent in one pass; return logits float32 [R, V], one row per id.

        Parent -1 is the last id of the text; any other is the index among the ids branched since the last
        `prefill_or_extend`, those before it in this call included.
        """

    def acceptance_probabilities(self) -> Sequence[AcceptanceFn] | None:
        """Return one function for the guesses after each row of the last `prefill_or_extend` or `branch`; None
        without an acceptance head."""


class DraftModel(Protocol):
    """The small model that drafts, at one set of weights. Its logits are numpy's: torch takes longer between passes."""

    vocab_size: int
    context_limit: int
    has_head: bool
    """Whether its sessions have `acceptance_probabilities`."""

    def open(self) -> DraftSession:
        """Return a new, empty session."""

    def prefill_or_extend_all(self, requests: Sequence[tuple[DraftSession, int, Sequence[int]]]) -> list[np.ndarray]:
        """Call `prefill_or_extend` on several distinct sessions, in one pass where the model can batch."""

    def branch_all(self, requests: Sequence[tuple[DraftSession, Sequence[int], Sequence[int]]]) -> list[np.ndarray]:
        """Call `branch` on several distinct sessions, in one pass where the model can batch."""


class RankedTokens(NamedTuple):
    """The most probable ids of a drafter that become target tokens, and the first ones of these, both best first, equal
    ones by id. Ids and places are int64, probabilities float64. Shapes: K such ids, M different target tokens."""

    max_logit: float
    """NaN where a logit is; where it is not finite, nothing is ranked."""
    draft_ids_K: np.ndarray
    draft_q_K: np.ndarray
    target_ids_M: np.ndarray
    first_M: np.ndarray
    """The place among K of the best draft id of each target token."""
    target_q_M: np.ndarray
    """The probability of all draft ids of each target token."""


RankTokens = Callable[[np.ndarray, Alignment], RankedTokens]
"""Ranks float32 logits [V] of a drafter; the result may be valid until the next call."""


class ProposerSession(Protocol):
    """Proposals for one request."""

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        """Return a tree within the limits under the last emitted token, possibly an empty one; `position` is that of
        the next emitted token."""

    def observe(self, emitted: Sequence[int]) -> None:
        """Learn the ids that the target emitted after the last tree."""

    def pause(self) -> None:
        """Give up the last tree and leave the drafter's KV cache to other texts; the text may go on later."""
        return

    def reset(self) -> None:
        """Forget the last tree and the drafter's KV cache, whose state is unknown after an exception."""
        return

    def close(self) -> None:
        """End the text; closing twice is allowed."""
        return


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One text that a tree is drafted for; see ProposerSession.propose."""

    session: Any
    """The proposer's own session of the text; a safe one around that for drafting/safe_drafting.py."""
    position: int
    limits: TreeLimits
    noise: Noise


@dataclass(frozen=True, slots=True)
class OtherTexts:
    """The texts that share the target with those that are drafted for together."""

    num_texts: int = 0
    """Texts that decode in the same pass and are not drafted for together with these, each with a row at least."""
    num_prompts: int = 0
    """Texts that decode as soon as their prompts are read."""
    num_prompt_rows: int = 0
    """The rows of the prompts that are read in the same pass."""

    @property
    def num_rows(self) -> int:
        """All their rows in the same pass."""
        return self.num_texts + self.num_prompt_rows

    def with_more(self, num_texts: int) -> "OtherTexts":
        """Return these with more texts that decode."""
        return replace(self, num_texts=self.num_texts + num_texts) if num_texts else self


NO_OTHERS = OtherTexts()


class Proposer(Protocol):
    """Drafts trees. One per snapshot, many sessions, one thread."""

    def open(self, request: Request) -> ProposerSession:
        """Return a session for this request, whose last prompt id is the first root."""

    def propose_all(self, requests: Sequence[DraftRequest], others: OtherTexts = NO_OTHERS) -> list[DraftTree]:
        """Return a tree for each of these texts, which the target scores in one pass beside the others. The sessions
        are distinct, and of one mode. A proposer that cannot batch inherits this: one text after another."""
        return [each.session.propose(each.position, each.limits, each.noise) for each in requests]


@dataclass(frozen=True, slots=True)
class RoundText:
    """A text that takes part in a round."""

    tenant: str
    max_new_tokens: int
    """The limit of the whole answer."""
    work: Work = "text"


@dataclass(frozen=True, slots=True)
class TextOutcome:
    """A text after a round."""

    tenant: str
    num_emitted: int
    num_nodes: int
    """The drafted nodes that the target scored."""
    step_rows: Sequence[int]
    """Its rows in each of the drafter's passes; 0 in those without it."""
    work: Work = "text"
    num_nodes_without: int = 0
    """The nodes that the target would have scored without the drafter, since others drafted them."""
    num_accepted_without: int = 0
    """Those of them that it drew."""
    search_s: float = 0.0
    """Seconds in which the suffix memory was searched for it; 0 where it was not."""
    num_remembered: int = 0
    """The scored nodes that this memory drafted."""
    num_accepted_remembered: int = 0
    """Those of them that the target drew."""

    @property
    def has_drafter(self) -> bool:
        """Whether the drafter took part."""
        return any(self.step_rows)


class RoundPlan(Protocol):
    """Decides how much to draft in one round. Values are estimated probabilities that a text passes through a node."""

    num_candidates: int = 1
    """The number of guesses that the drafter makes after each node."""
    uses_acceptance_head: bool = False
    """Whether the values of guesses come from the drafter's acceptance head, where it has one."""

    def should_search(self, index: int) -> bool:
        """Return whether the suffix memory is searched for this text."""
        return True

    def should_draft(self, index: int, num_ids: int) -> bool:
        """Return whether the drafter drafts for this text, of which it has to read about `num_ids` ids first."""
        return True

    def should_read(self, index: int, num_ids: int, num_last: int) -> bool:
        """Return whether the drafter, if it drafts for this text, reads all the `num_ids` ids that it has not read, and
        not only the `num_last` last ones."""
        return True

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """Return how many of these nodes, of all texts and in falling order of value, the drafter expands in one step;
        0 ends drafting.

        At first the nodes are the ends of the texts; `num_nodes` would be scored if nothing more were drafted.
        """
        return len(values)

    def prune(self, values: Sequence[float], acceptances: Sequence[float] | None = None) -> int:
        """Return how many of these nodes, of all texts and best first, the target scores. `acceptances`: the estimated
        probability of each, given its parent, when the next pass drafts it instead; None: no pass will."""
        return len(values)


class Policy(Protocol):
    """Decides how much to draft, and learns from the outcome."""

    def start_round(self, texts: Sequence[RoundText], others: OtherTexts = NO_OTHERS) -> RoundPlan:
        """Return the plan for these texts, which share the target with the others."""

    def update(self, outcomes: Sequence[TextOutcome], others: OtherTexts = NO_OTHERS) -> None:
        """Account for the texts of a round."""
        return

    def finish(self, tenant: str, num_emitted: int, work: Work = "text") -> None:
        """Account for a text of this tenant and kind that ended after so many tokens."""
        return


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Several texts in one pass without padding: first the contexts of all, which get no gradient, then the rest."""

    ids_R: torch.Tensor
    """int64, the drafter's."""
    text_R: torch.Tensor
    """int64; the text of each row. A row attends to rows of its own text only."""
    position_R: torch.Tensor
    """int64; starts at 0 in each text."""
    num_context: int
    """The number of context rows."""


class TrainableDrafter(Protocol):
    """The drafter inside the learner. R rows of a pass, C of them context, N selected rows, H hidden size, V_q
    vocabulary."""

    vocab_size: int
    context_limit: int

    @property
    def precision(self) -> Precision:
        """The format that passes are computed in."""

    def compute_in(self, precision: Precision) -> None:
        """Compute in this format from now on, or, with a warning, in float32 where it does not work."""

    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """Return the trained parameters by name, float32, in a fixed order."""

    def linear_shapes(self) -> Mapping[str, tuple[int, int]]:
        """Return the shape [N, K] of each linear layer that may have low-rank factors, by its name in a snapshot."""

    def factored(self, factors: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Inside the `with` block, add these low-rank factors (see snapshots/low_rank.py) to the weights, and give
        gradients to the factors alone."""

    def hidden(self, texts: PackedTexts) -> torch.Tensor:
        """Return the last hidden states [R - C, H] of the rows after the context, whose keys and values are
        constants."""

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V_q] of selected rows of the last hidden states, in the precision of the pass."""

    def serving_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a worker adds to the base drafter: all weights in bfloat16, or LoRA factors in
        float32."""


class TrainableHead(Protocol):
    """The acceptance head inside the learner. N guesses, H hidden size of the drafter."""

    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """Return the trained parameters by their names in a snapshot, which differ from all names of a drafter."""

    def logits(self, hidden_NH: torch.Tensor, log_q_N: torch.Tensor) -> torch.Tensor:
        """Return the logits float32 [N] of the probability that a guess, made from this hidden state with this log q,
        is accepted."""
