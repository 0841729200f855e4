"""What drafting gained for the texts of one tenant, or of all, of one kind and load, and how long their answers are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.ports import RoundText, TextOutcome, Work

EMA_WEIGHT = 0.03
"""Weight of a new observation in a moving average."""
MIN_GAIN = -0.1
"""The lowest estimate of the tokens that the drafter gains per text and round, so that a few good trials bring it
back."""
_FIRST_ROUNDS = 10
"""Rounds that the prior gain counts for."""
_DECAY = 0.97
"""Decay per round of the sums of seconds: about 30 rounds count."""


@dataclass(frozen=True, slots=True)
class SpentText:
    """A text after a round, with its share of the round's seconds."""

    outcome: TextOutcome
    seconds: float
    seconds_without: float
    """What it would have taken without the drafter."""

    @property
    def num_without(self) -> int:
        """Tokens that the round would have given without the drafter."""
        return 1 + self.outcome.num_accepted_without if self.outcome.has_drafter else self.outcome.num_emitted

    def gain(self, token_s: float) -> float:
        """Return how many tokens the drafter added to those of the time that it took, at `token_s` for each of them."""
        return self.outcome.num_emitted - self.num_without - (self.seconds - self.seconds_without) / token_s


@dataclass(slots=True)
class DraftingStats:
    """The gain of the drafter for one tenant's texts, or for those of all, of one kind under one load."""

    gain: float
    emits: float = 2.0
    """Tokens per text and round with a drafter."""
    num_drafted: int = 0
    """Rounds with a drafter."""
    trials_left: int = 0
    idle_s: float = 0.0
    """Seconds without a drafter that no trial was taken from."""
    plain_s: float = 0.0
    """Seconds that recent rounds' tokens would have taken without drafting."""
    seconds: float = 0.0
    """Seconds that they took."""
    plain_without_s: float = 0.0
    """Seconds that the tokens that those rounds would have given without the drafter take in plain decoding."""
    seconds_without: float = 0.0
    """Seconds that they would have taken without the drafter."""

    @property
    def speedup_without(self) -> float:
        """Return how many times as fast as plain decoding the other draft sources are, and at least 1."""
        return max(self.plain_without_s / self.seconds_without, 1.0) if self.seconds_without else 1.0

    def add(self, texts: Sequence[SpentText], token_s: float) -> None:
        """Add these texts of a round; a token of plain decoding takes `token_s`."""
        drafted = [each for each in texts if each.outcome.has_drafter]
        self.plain_without_s = self.plain_without_s * _DECAY + token_s * sum(each.num_without for each in texts)
        self.seconds_without = self.seconds_without * _DECAY + sum(each.seconds_without for each in texts)
        if drafted:
            emits = sum(each.outcome.num_emitted for each in drafted) / len(drafted)
            earned = sum(each.gain(token_s / self.speedup_without) for each in drafted)
            self.add_gain(emits, earned / len(drafted))
        self.plain_s = self.plain_s * _DECAY + token_s * sum(each.outcome.num_emitted for each in texts)
        self.seconds = self.seconds * _DECAY + sum(each.seconds for each in texts)

    def add_idle(self, texts: Sequence[SpentText]) -> None:
        """Add the seconds of those of these texts that had no drafter, which trials are taken from."""
        self.idle_s += sum(each.seconds for each in texts if not each.outcome.has_drafter)

    def add_gain(self, emits: float, earned: float) -> None:
        """Add a round with a drafter: tokens per text, and how many of them it earned."""
        weight = max(EMA_WEIGHT, 1 / (_FIRST_ROUNDS + self.num_drafted))
        self.num_drafted += 1
        self.trials_left = max(self.trials_left - 1, 0)
        self.gain = max(self.gain + weight * (earned - self.gain), MIN_GAIN)
        self.emits += weight * (emits - self.emits)


@dataclass(slots=True)
class AnswerLength:
    """The moving average of the tokens of one tenant's answers, or of all, of one kind."""

    mean: float = 128.0

    def add(self, num_tokens: int) -> None:
        """Add the tokens of an answer that ended."""
        self.mean += EMA_WEIGHT * (num_tokens - self.mean)


def load_of(num_texts: int) -> int:
    """Return the nearest power of two, so that a text that ends changes no load of 2, 4, 8 or 16 texts."""
    return round(math.log2(num_texts))


def stream_of(text: RoundText | TextOutcome) -> tuple[str, Work]:
    """Return what the text's gains are counted for: its tenant and its kind."""
    return text.tenant, text.work
