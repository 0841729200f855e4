"""Maps a prompt from target ids to the drafter's ids.

Text between special tokens is tokenised again; a special token becomes the drafter's of the same role, and is left out
where the drafter has none. So a chat in a template that both models share reads as both were trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.retokenise import retokenise
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary


@dataclass(frozen=True, slots=True)
class DrafterPrompt:
    """A prompt in two parts."""

    ids: list[int]
    """Drafter ids up to the last special token."""
    rest: list[int]
    """Target ids after that, which the answer continues; they spell text."""


def map_prompt(
    prompt_ids: Sequence[int], target: Vocabulary, tokenizer: Tokenizer, alignment: Alignment, *, longest: int
) -> DrafterPrompt:
    """Return at most the last `longest` draft ids, so that a drafter with a short context still reads the end.

    Raises:
        VocabularyError: the drafter cannot spell it.
    """
    last = max((at for at, token in enumerate(prompt_ids) if token in target.special_ids), default=-1)
    ids = retokenise(prompt_ids[: last + 1], target, tokenizer, alignment)
    rest = list(prompt_ids[last + 1 :])
    return DrafterPrompt(ids[max(len(ids) - longest, 0) :], rest[max(len(rest) - longest, 0) :])
