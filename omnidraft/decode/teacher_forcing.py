"""Teacher forcing: a given answer as steps of the target, with its log-probabilities at each position and no draws.

Shapes: E ids of the given answer, N nodes of a pass, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from omnidraft.config import Mode
from omnidraft.decode.logprobs import top_k_logprobs
from omnidraft.ports import DraftTree, FinishReason, Request, Source, Step, Target, Timings


@dataclass(frozen=True, slots=True)
class ForcedPass:
    """One pass of the target over ids that follow each other."""

    root: int
    """The id before them."""
    ids: tuple[int, ...]
    logits_NV: torch.Tensor
    """One row for each of these ids: what the target expected in its place."""
    target_s: float


def forced_passes(
    target: Target,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    mode: Mode,
    num_rows: Callable[[], int] | None = None,
) -> Iterator[ForcedPass]:
    """Yield passes that read these ids after a prompt.

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
            target_s = time.perf_counter() - started
            if num_read < len(ids):
                session.keep(range(len(chain)))
            yield ForcedPass(root, forced, logits_NV, target_s)
            root = forced[-1]
    finally:
        session.close()


def force(target: Target, request: Request, answer_ids: Sequence[int], top_k: int) -> Iterator[Step]:
    """Yield steps that emit these ids, at least one, with nothing drafted. `max_new_tokens` cuts them.

    Raises:
        RequestError: the target cannot take the prompt with the answer.
    """
    answer_E = tuple(answer_ids[: request.max_new_tokens])
    num_left = len(answer_E)
    for each in forced_passes(target, request.prompt_ids, answer_E, request.mode):
        num_left -= len(each.ids)
        yield Step(
            tree=DraftTree.empty(each.root),
            emitted=each.ids,
            path=(),
            text="",
            finish_reason=None if num_left else _reason(request, each.ids[-1]),
            timings=Timings(target_s=each.target_s),
            target_logprobs=top_k_logprobs(each.logits_NV, range(len(each.ids)), each.ids, top_k),
        )


def _reason(request: Request, last_id: int) -> FinishReason:
    return FinishReason.STOP if last_id in request.stop_ids else FinishReason.LENGTH
