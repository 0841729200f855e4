"""The drafter's prompt where only the target's ids of it are known."""

from collections.abc import Sequence

from omnidraft.assembly.vocabularies import Vocabularies
from omnidraft.decode.external.prompt_mapping import map_prompt
from omnidraft.errors import VocabularyError

_LONGEST_PROMPT_SHARE = 0.75
"""The share of the drafter's context that a prompt may fill; the rest is for the answer."""


def drafter_prompt(
    prompt_ids: Sequence[int], tokenizers: Vocabularies, context_limit: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the drafter's ids up to the last special token, and the target's ids after it, which the drafter reads as
    it reads the answer. Neither where the drafter cannot spell the prompt: it then reads the answer only."""
    longest, vocabulary = int(context_limit * _LONGEST_PROMPT_SHARE), tokenizers.target.vocabulary
    try:
        prompt = map_prompt(prompt_ids, vocabulary, tokenizers.drafter, tokenizers.alignment, longest=longest)
    except VocabularyError:
        return (), ()
    return tuple(prompt.ids), tuple(prompt.rest)
