"""Compare speculation with plain decoding at the same seed, token by token, and explain each difference.

Both texts are decoded side by side. At the first difference the logits of both passes are compared. Rounding explains
the difference when these logits differ by no more than passes over one text are known to differ, and when each token is
the one that its logits and the noise give: then the draw was correct and only rounding changed its input. Anything else
is a failure. After an explained difference the comparison continues from the text of plain decoding.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, replace
from itertools import zip_longest
from typing import Literal

import numpy as np

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.sampling.logits_pipeline import LogitsPipeline
from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import VocabularyError
from omnidraft.exactness.rounding import logit_difference
from omnidraft.exactness.tracing_target import TracedToken, trace_tokens
from omnidraft.ports import Proposer, Request
from omnidraft.vocab.retokenise import tokenise_bytes
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

Verdict = Literal["identical", "explained", "unexplained"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A position at which the two texts differ."""

    index: int
    """Index of the token in the answer, from 0."""
    plain_token: int | None
    """None when plain decoding had ended."""
    drafted_token: int | None
    logit_difference: float | None
    """Largest difference of one logit between the two passes; None when one of the texts had ended."""
    problem: str | None
    """The part that rounding cannot explain; None when it explains the difference."""


@dataclass(frozen=True, slots=True)
class TextComparison:
    """One answer, decoded both ways."""

    answer: tuple[int, ...]
    """Ids of plain decoding, as far as they were compared."""
    differences: tuple[Difference, ...]
    stats: DecodeStats
    """Statistics of the speculative decoding."""

    @property
    def verdict(self) -> Verdict:
        if not self.differences:
            return "identical"
        return "explained" if all(each.problem is None for each in self.differences) else "unexplained"


@dataclass(frozen=True, slots=True)
class TextComparer:
    """Compares speculative and plain decoding of one decoder and proposer."""

    decoder: Decoder
    proposer: Proposer
    target: Vocabulary
    drafter: Tokenizer | None
    """None where no model drafts."""
    _: KW_ONLY
    rounding: float
    """Logits of two passes over one text may differ by this much; 0 allows no differing token."""

    def compare(self, request: Request, companions: Sequence[Request] = ()) -> TextComparison:
        """Decode the request both ways, to the end or to the first difference that rounding does not explain. The
        `companions` are decoded beside the speculative text; plain decoding is alone."""
        answer: list[int] = []
        differences: list[Difference] = []
        stats, remaining = DecodeStats(), request
        with closing(trace_tokens(self.decoder, replace(request, num_draft_tokens=0), None)) as plain:
            while (pair := self._first_difference(remaining, companions, plain, answer, stats)) is not None:
                differences.append(self._difference(request, answer, *pair))
                if pair[1] is not None:
                    answer.append(pair[1].token)
                if differences[-1].problem or _is_over(request, answer):
                    break
                remaining = self._continuation(request, answer)
        return TextComparison(tuple(answer), tuple(differences), stats)

    def _first_difference(
        self,
        request: Request,
        companions: Sequence[Request],
        plain: Iterator[TracedToken],
        answer: list[int],
        stats: DecodeStats,
    ) -> tuple[TracedToken | None, TracedToken | None] | None:
        """Return the first two tokens that differ, None when both texts end together; equal ones go into `answer`."""
        with closing(trace_tokens(self.decoder, request, self.proposer, stats, companions)) as drafted:
            for ours, theirs in zip_longest(drafted, plain):
                if ours is None or theirs is None or ours.token != theirs.token:
                    return ours, theirs
                answer.append(ours.token)
        return None

    def _difference(
        self, request: Request, answer: Sequence[int], ours: TracedToken | None, theirs: TracedToken | None
    ) -> Difference:
        index = len(answer)
        if ours is None or theirs is None:
            first = "speculation" if ours is None else "plain decoding"
            tokens = (theirs.token if theirs else None, ours.token if ours else None)
            return Difference(index, *tokens, None, f"{first} ended the text here, the other went on")
        difference = logit_difference(ours.logits_V, theirs.logits_V)
        problem = None
        if not difference <= self.rounding:
            problem = f"the logits are {difference:.3g} apart, rounding explains {self.rounding:.3g}"
        for name, traced in (("plain decoding", theirs), ("speculation", ours)):
            if (expected := _expected_token(request, answer, traced)) != traced.token:
                problem = f"{name} drew token {traced.token}, its logits and noise give {expected}"
        return Difference(index, theirs.token, ours.token, difference, problem)

    def _continuation(self, request: Request, answer: Sequence[int]) -> Request:
        """Return the request with plain's answer so far in its prompt; noise depends on the absolute position."""
        drafter_ids = request.drafter_prompt_ids
        if self.drafter is not None:
            with suppress(VocabularyError):  # the drafter cannot spell it and drafts from the prompt alone
                drafter_ids += tuple(tokenise_bytes(self.drafter, self.target.spell(answer)))
        return replace(
            request,
            prompt_ids=(*request.prompt_ids, *answer),
            drafter_prompt_ids=drafter_ids,
            max_new_tokens=request.max_new_tokens - len(answer),
        )


def _is_over(request: Request, answer: Sequence[int]) -> bool:
    return answer[-1] in request.stop_ids or len(answer) == request.max_new_tokens


def _expected_token(request: Request, answer: Sequence[int], traced: TracedToken) -> int:
    """Return the token that the noise draws from these logits after this answer."""
    logits_V = traced.logits_V.float().cpu().numpy()
    noise = SeededNoise(request.seed, request.choice, len(logits_V))
    return noise.draw(*token_probabilities(request, answer, logits_V), len(request.prompt_ids) + len(answer))


def token_probabilities(request: Request, answer: Sequence[int], logits_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and probabilities of the token after this answer, processors applied."""
    pipeline = LogitsPipeline(request)
    for token in answer:
        pipeline.take(token)
    return pipeline.distribution(logits_V)
