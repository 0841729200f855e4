"""Token healing: the line break at the end of a text is drafted again where the drafter has tokens that continue it.

GPT-2's pre-tokenizer joins a line break with the spaces that follow, so after a target's token for the break alone the
drafter would read an id that its own text of that place never has, and draft what no indented line begins with.
Without that id, its tokens that begin with a line break tell what follows: their bytes behind the break are spelled in
target tokens, and the break alone is the prefix of a text that goes on otherwise.
Source: token healing, as in https://github.com/guidance-ai/guidance, for a target with another vocabulary.
Shapes: D the drafter's vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from omnidraft.vocab.alignment import Alignment, PackedLists, longest_match
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

_BREAK = b"\n"
_INDENTED = "   a"


class TokenHealing:
    """Continues drafter's tokens that begin with a line break behind one."""

    def __init__(self, draft: Vocabulary, target: Tokenizer, alignment: Alignment) -> None:
        """Heal nothing for a target that joins all spaces before a word, as Gemma's: the drafter leaves the last one to
        the word, and its tokens would promise one space less."""
        self._draft, self._target, self._alignment = draft, target.vocabulary, alignment
        self.break_id = draft.byte_table.get(_BREAK)
        is_joined = self._target.spell(target.encode(_INDENTED)[:1]) == _INDENTED[:-1].encode()
        self._behind_break = {} if is_joined or self.break_id is None else self._found_longer()

    def is_due(self, ids: Sequence[int]) -> bool:
        """Return whether these ids of a text end with a line break behind which white space is to be expected, because
        the line before began with some."""
        if not self._behind_break or len(ids) < 2 or ids[-1] != self.break_id:
            return False
        before = next((each for each in reversed(ids[:-1]) if self._draft.token_bytes[each].startswith(_BREAK)), None)
        return before is not None and bool(self._draft.token_bytes[before].strip(_BREAK))

    @cached_property
    def alignment(self) -> Alignment:
        """The map of the drafter's tokens that begin with a line break, without it; all others are unmapped, as are
        those of several pieces where the pair's own map has none of these."""
        pieces: list[tuple[int, ...]] = [()] * self._alignment.num_draft
        for token, data in self._behind_break.items():
            pieces[token] = longest_match(self._target.byte_table, data)
        healed = replace(self._alignment, targets_of_draft=PackedLists.of(pieces))
        return healed if (self._alignment.targets_of_draft.lengths > 1).any() else healed.without_splits()

    def divided(self, logits_D: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the logits of the tokens that begin with a line break and go on, all others -inf, and the probability
        that it is the break alone, among all that begin with it."""
        assert self.break_id is not None
        ids = [self.break_id, *self._behind_break]
        logits = np.full_like(logits_D, -np.inf)
        if (best := logits_D[ids].max()) == -np.inf:
            return logits, 1.0
        odds = np.exp(logits_D[ids] - best)
        logits[ids[1:]] = logits_D[ids[1:]]
        return logits, float(odds[0] / odds.sum())

    def _found_longer(self) -> dict[int, bytes]:
        """Return the drafter's tokens that begin with a line break and go on, with what follows it."""
        longer = {}
        for token, data in enumerate(self._draft.token_bytes):
            if data.startswith(_BREAK) and data != _BREAK and self._draft.byte_table.get(data) == token:
                longer[token] = data.removeprefix(_BREAK)
        return longer
