"""The target's log-probabilities of a prompt's own tokens, each given those before it.

Shapes: N rows of a pass, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omnidraft.config import Mode
from omnidraft.decode.logprobs import client_logprobs
from omnidraft.decode.teacher_forcing import ForcedPass, forced_passes
from omnidraft.ports import Target


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a prompt that others stand before."""

    token: int
    log_p: float
    rank: int
    """1 for the most probable token."""
    likeliest: tuple[tuple[int, float], ...]
    """The most probable tokens in its place with their log-probabilities, most probable first."""


def score_prompt(target: Target, prompt_ids: Sequence[int], num: int, mode: Mode) -> Iterator[list[PromptToken]]:
    """Yield the tokens after the first, pass by pass; `num` of the likeliest with each.

    Raises:
        RequestError: the target cannot take the prompt.
    """
    if len(prompt_ids) > 1:
        for each in forced_passes(target, prompt_ids[:1], prompt_ids[1:], mode):
            yield list(_scored(each, num))


def _scored(each: ForcedPass, num: int) -> Iterator[PromptToken]:
    log_probs = client_logprobs(each.logits_NV, range(len(each.ids)), each.ids, num)
    for row, token in enumerate(each.ids):
        logits_V = each.logits_NV[row]
        rank = 1 + int((logits_V > logits_V[token]).sum())
        yield PromptToken(token, log_probs.emitted[row], rank, log_probs.likeliest[row])
