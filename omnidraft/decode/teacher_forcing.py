"""Teacher forcing: a given answer as steps of the target, with its log-probabilities at each position and no draws.

Shapes: E ids of the given answer, N nodes of a pass.
"""

import time
from collections.abc import Iterator, Sequence

from omnidraft.decode.logprobs import top_k_logprobs
from omnidraft.ports import DraftTree, FinishReason, Request, Source, Step, Target, Timings


def force(target: Target, request: Request, answer_ids: Sequence[int], top_k: int) -> Iterator[Step]:
    """Yield steps that emit these ids, at least one, with nothing drafted. `max_new_tokens` cuts them.

    Raises:
        RequestError: the target cannot take the prompt with the answer.
    """
    answer_E = tuple(answer_ids[: request.max_new_tokens])
    limits = target.limits(request.mode)
    rows = 1 + min(limits.num_nodes, limits.depth or limits.num_nodes)
    session = target.open(request.prompt_ids, len(answer_E), request.mode)
    root = request.prompt_ids[-1]
    try:
        for start in range(0, len(answer_E), rows):
            emitted = answer_E[start : start + rows]
            inside = emitted[:-1]
            started = time.perf_counter()
            chain = DraftTree.chain(root, inside, [Source.LOOKUP] * len(inside), [0.0] * len(inside))
            logits_NV = session.score(chain)
            target_s = time.perf_counter() - started
            nodes = range(len(chain))
            is_last = start + rows >= len(answer_E)
            if not is_last:
                session.keep(nodes)
            yield Step(
                tree=DraftTree.empty(root),
                emitted=emitted,
                path=(),
                text="",
                finish_reason=_reason(request, emitted[-1]) if is_last else None,
                timings=Timings(target_s=target_s),
                target_logprobs=top_k_logprobs(logits_NV, nodes, emitted, top_k),
            )
            root = emitted[-1]
    finally:
        session.close()


def _reason(request: Request, last_id: int) -> FinishReason:
    return FinishReason.STOP if last_id in request.stop_ids else FinishReason.LENGTH
