"""How much of the target's noise the drafter should use (w of algorithms.md section 3), from measured agreement.

At every judged place each weight is asked what it would have guessed first, so none has to be tried out.
"""

from collections import defaultdict
from collections.abc import Sequence

_FADES = 0.99


class NoiseCoupling:
    """Shared by all requests of one snapshot; temperatures are kept apart, rounded to tenths."""

    def __init__(self, weights: Sequence[float]) -> None:
        """The first weight is used until another has been right more often."""
        self.weights = tuple(weights)
        self._right: dict[float, list[float]] = defaultdict(lambda: [0.0] * len(self.weights))

    def best(self, temperature: float) -> float:
        right = self._right.get(round(temperature, 1))
        return self.weights[right.index(max(right))] if right else self.weights[0]

    def update(self, temperature: float, firsts: Sequence[int | None], token: int) -> None:
        """What each weight would have guessed first, and what the target drew."""
        right = self._right[round(temperature, 1)]
        right[:] = [count * _FADES + (first == token) for count, first in zip(right, firsts, strict=True)]
