"""Draw a known answer again, in reproducible mode, and find the first token that differs.

Shapes: V vocabulary.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from omnidraft.decode.engine import Engine
from omnidraft.exactness.tracing_target import trace_tokens
from omnidraft.params import check_sampling, require_ids, require_integer
from omnidraft.ports import Request, ids_needed


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first token at which an answer is not what the model draws."""

    index: int
    """Its index in the answer, from 0."""
    given: int | None
    """The answer's token; None: it had ended."""
    drawn: int | None
    """The model's; None: it ends the answer before."""
    logit_difference: float | None
    """The raw logit of the drawn token less that of the given one; None where one of them is missing."""


def recompute(engine: Engine, request: Request, answer_ids: Sequence[int], *, num_draft_tokens: int) -> Mismatch | None:
    """Draw the answer to a request in reproducible mode; return where it differs first, None for the same bits.

    Args:
        num_draft_tokens: of the answer itself, which is drafted first; 0 decodes plainly, a token a pass.

    Raises:
        RequestError: no API takes this request, or no answer has these ids.
    """
    _require_possible(request, answer_ids, len(engine.pair.target_tokenizer.vocabulary))
    ids_needed(request.prompt_ids, request.max_new_tokens, engine.decoder.target.context_limit)
    request = replace(request, num_draft_tokens=num_draft_tokens, prediction_ids=tuple(answer_ids))
    with closing(trace_tokens(engine.decoder, request, engine.slot.current.proposer)) as tokens:
        for index, (given, traced) in enumerate(zip_longest(answer_ids, tokens)):
            if given is None or traced is None:
                return Mismatch(index, given, None if traced is None else traced.token, None)
            if given != traced.token:
                difference = traced.logits_V[traced.token] - traced.logits_V[given]
                return Mismatch(index, given, traced.token, float(difference))
    return None


def _require_possible(request: Request, answer_ids: Sequence[int], vocab_size: int) -> None:
    ids = {"prompt": request.prompt_ids, "answer": answer_ids, "stop_ids": request.stop_ids}
    for name, each in (ids | {"bad_ids": chain(*request.bad_ids)}).items():
        require_ids(name, each, vocab_size)
    check_sampling(request.sampling, vocab_size)
    require_integer("max_new_tokens", request.max_new_tokens, at_least=1)
    for bad in request.bad_ids:
        require_integer("the length of bad_ids", len(bad), at_least=1)
