"""The target's log-probabilities of a prompt's own tokens, each given those before it.

Shapes: N rows of a pass, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.logprobs import client_logprobs
from omnidraft.decode.teacher_forcing import ForcedPass, forced_passes
from omnidraft.ports import Request


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
        with decoder.scheduler.reserve(len(request.prompt_ids), mode):
            for each in forced_passes(decoder.target, first, others, mode, partial(decoder.scoring_rows, mode)):
                yield list(_scored(each, num))


def _scored(each: ForcedPass, num: int) -> Iterator[PromptToken]:
    log_probs = client_logprobs(each.logits_NV, range(len(each.ids)), each.ids, num)
    for row, token in enumerate(each.ids):
        logits_V = each.logits_NV[row]
        rank = 1 + int((logits_V > logits_V[token]).sum())
        yield PromptToken(token, log_probs.emitted[row], rank, log_probs.likeliest[row])
