"""Teacher forcing: given ids as steps of the target, with its log-probabilities at each position and no draws.

Answers are given for their trace records, prompts for the log-probabilities of their own tokens.
Shapes: N nodes of a pass, one for each given id, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from omnidraft.config import Mode
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.logprobs import client_logprobs, top_k_logprobs
from omnidraft.ports import DraftTree, FinishReason, Request, Source, Step, Target, Timings


def force(target: Target, request: Request, answer_ids: Sequence[int], top_k: int) -> Iterator[Step]:
    """Yield steps that emit these ids, at least one, with nothing drafted. `max_new_tokens` cuts them.

    Raises:
        RequestError: the target cannot take the prompt with the answer.
    """
    ids = answer_ids[: request.max_new_tokens]
    num_left, last = len(ids), FinishReason.STOP if ids[-1] in request.stop_ids else FinishReason.LENGTH
    for step, logits_NV in _forced_steps(target, request.prompt_ids, ids, request.mode):
        num_left -= len(step.emitted)
        traced = top_k_logprobs(logits_NV, range(len(step.emitted)), step.emitted, top_k)
        yield replace(step, finish_reason=None if num_left else last, target_logprobs=traced)


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a prompt that others stand before."""

    token: int
    log_p: float
    rank: int
    """1 for the most probable token."""
    likeliest: tuple[tuple[int, float], ...]
    """The most probable tokens in its place with their log-probabilities, most probable first."""


def score_prompt(decoder: Decoder, request: Request, num: int) -> Iterator[list[PromptToken]]:
    """Yield the tokens of the request's prompt after the first, pass by pass; `num` of the likeliest with each.

    Raises:
        RequestError: the target cannot take the prompt.
    """
    first, others, mode = request.prompt_ids[:1], request.prompt_ids[1:], request.mode
    if others:
        num_rows = partial(decoder.scoring_rows, mode)
        with decoder.scheduler.reserve(len(request.prompt_ids), mode):
            for step, logits_NV in _forced_steps(decoder.target, first, others, mode, num_rows):
                yield list(_scored(step.emitted, logits_NV, num))


def _scored(ids: Sequence[int], logits_NV: torch.Tensor, num: int) -> Iterator[PromptToken]:
    log_probs = client_logprobs(logits_NV, range(len(ids)), ids, num)
    for row, token in enumerate(ids):
        rank = 1 + int((logits_NV[row] > logits_NV[row, token]).sum())
        yield PromptToken(token, log_probs.emitted[row], rank, log_probs.likeliest[row])


def _forced_steps(
    target: Target,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    mode: Mode,
    num_rows: Callable[[], int] | None = None,
) -> Iterator[tuple[Step, torch.Tensor]]:
    """Yield passes that read these ids after a prompt, each with the logits [N, V] that the target expected them by.

    Args:
        num_rows: returns how many ids the next pass reads at most; None reads as many as a tree has room for.

    Raises:
        RequestError: the target cannot take the prompt with the ids.
    """
    longest = target.limits(mode).longest_chain
    session = target.open(prompt_ids, len(ids), mode)
    root, num_read = prompt_ids[-1], 0
    try:
        while num_read < len(ids):
            forced = tuple(ids[num_read : num_read + (num_rows() if num_rows else longest)])
            num_read += len(forced)
            inside = forced[:-1]
            started = time.perf_counter()
            chain = DraftTree.chain(root, inside, [Source.LOOKUP] * len(inside), [0.0] * len(inside))
            logits_NV = session.score(chain)
            timings = Timings(target_s=time.perf_counter() - started)
            if num_read < len(ids):
                session.keep(range(len(chain)))
            yield Step(DraftTree.empty(root), forced, (), "", None, timings, None), logits_NV
            root = forced[-1]
    finally:
        session.close()
