"""The prompts of a measurement. No question begins like another: all that a server finds again is the chat template."""

from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.vocab.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Workload:
    """The texts of a prompt file, and the target's tokenizer."""

    texts: Sequence[str]
    tokenizer: Tokenizer

    def prompts(self, part: str, num: int) -> list[str]:
        """Return `num` prompts of the file, from the start again after its end, each begun with part and number.

        The same part gives the same prompts, so that all systems get them.
        """
        return [f"({part}, {number}) {self.texts[number % len(self.texts)]}" for number in range(num)]

    def long_text(self, part: str, num_tokens: int) -> str:
        """Return prompts of the file, one after another, cut to about so many of the target's tokens."""
        ids: list[int] = []
        number = 0
        while len(ids) < num_tokens:
            ids += self.tokenizer.encode(f"({part}, {number}) {self.texts[number % len(self.texts)]}\n")
            number += 1
        return self.tokenizer.vocabulary.spell(ids[:num_tokens]).decode(errors="ignore")

    def count_tokens(self, text: str) -> int:
        """Return the number of the target's tokens of a text."""
        return len(self.tokenizer.encode(text))
