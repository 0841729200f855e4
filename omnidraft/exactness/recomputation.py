"""Draw a known answer again, in reproducible mode, and find the first token that differs.

Shapes: V vocabulary.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import zip_longest

from omnidraft.decode.decoder import Decoder
from omnidraft.exactness.tracing_target import trace_tokens
from omnidraft.params import check_sampling, require_ids
from omnidraft.ports import Proposer, Request


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


def recompute(
    decoder: Decoder, proposer: Proposer | None, request: Request, answer_ids: Sequence[int], *, num_draft_tokens: int
) -> Mismatch | None:
    """Draw the answer to a request in reproducible mode; return where it differs first, None for the same bits.

    Args:
        num_draft_tokens: of the answer itself, which is drafted first; 0 decodes plainly, a token a pass.

    Raises:
        RequestError: the target cannot take the request.
    """
    vocab_size = decoder.target.vocab_size
    require_ids("prompt", request.prompt_ids, vocab_size)
    check_sampling(request.sampling, vocab_size)
    request = replace(request, num_draft_tokens=num_draft_tokens, prediction_ids=tuple(answer_ids))
    with closing(trace_tokens(decoder, request, proposer)) as tokens:
        for index, (given, traced) in enumerate(zip_longest(answer_ids, tokens)):
            if given is None or traced is None or given >= vocab_size:
                return Mismatch(index, given, None if traced is None else traced.token, None)
            if given != traced.token:
                difference = traced.logits_V[traced.token] - traced.logits_V[given]
                return Mismatch(index, given, traced.token, float(difference))
    return None
