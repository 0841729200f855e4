"""The drafter's ids of a prompt that is known in the target's ids only.

What is said between special tokens is tokenised again; a special token becomes the drafter's of the same role, and is
left out where the drafter has none. So a chat in a template that both models share reads as both were taught.
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
    """The drafter's, up to the last special token."""
    rest: list[int]
    """The target's ids behind that, which the answer goes on from; they spell text."""


def map_prompt(
    prompt_ids: Sequence[int], target: Vocabulary, tokenizer: Tokenizer, alignment: Alignment, *, longest: int
) -> DrafterPrompt:
    """At most the last `longest` draft ids, so that a drafter with a short memory still knows the end.

    Raises:
        VocabularyError: the drafter cannot spell it.
    """
    last = max((at for at, token in enumerate(prompt_ids) if token in target.special_ids), default=-1)
    ids = retokenise(prompt_ids[: last + 1], target, tokenizer, alignment)
    rest = list(prompt_ids[last + 1 :])
    return DrafterPrompt(ids[max(len(ids) - longest, 0) :], rest[max(len(rest) - longest, 0) :])
