"""Maps a prompt from target ids to the drafter's ids.

Text between special tokens is tokenised again; a special token becomes the drafter's of the same role, and is left out
where the drafter has none. So a chat in a template that both models share reads as both were trained.
"""

from collections.abc import Sequence

from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.retokenise import retokenise
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary


def map_prompt(
    prompt_ids: Sequence[int], target: Vocabulary, tokenizer: Tokenizer, alignment: Alignment, *, longest: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the drafter's ids up to the last special token, and the target's ids after it, whose text the answer
    continues; of both at most the last `longest`, so that a drafter with a short context still reads the end.

    Raises:
        VocabularyError: the drafter cannot spell it.
    """
    last = max((at for at, token in enumerate(prompt_ids) if token in target.special_ids), default=-1)
    ids, rest = retokenise(prompt_ids[: last + 1], target, tokenizer, alignment), prompt_ids[last + 1 :]
    return tuple(ids[max(len(ids) - longest, 0) :]), tuple(rest[max(len(rest) - longest, 0) :])
