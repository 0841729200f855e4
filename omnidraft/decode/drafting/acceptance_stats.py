"""How often a guess of some kind was right, by how sure its proposer was: from it the chance of the next such guess.

What a proposer says of itself (q) is only the beginning: a bin of q that was right 60 times in 100 counts as 0.6.
Old guesses fade, so that the table follows the traffic.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from omnidraft.ports import Source

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_DEEP = (2, 3, 5)
_PRIOR_GUESSES = 6.0
"""What a proposer's own q counts for, in guesses."""
_MEMORY_GUESSES = 400.0
_LEAST, _MOST = 0.001, 0.995
_FADES = 0.99


class GuessKind(NamedTuple):
    """What guesses are counted together, besides their bin of q."""

    source: Source
    rank: int
    """0 is the proposer's first choice."""
    style: tuple[float, float] = (0.0, 0.0)
    """Temperature, and how much of the noise the ranking used."""


class AcceptanceCalibrator:
    """Shared by all requests of one snapshot."""

    def __init__(self) -> None:
        self._counts: dict[tuple[GuessKind, int, int | None], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def chance(self, kind: GuessKind, q: float, depth: int) -> float:
        """That such a guess is right, given that everything before it was."""
        place = bisect(_EDGES, q)
        at_any_depth = self._shrunk((kind, place, None), q)
        return min(max(self._shrunk((kind, place, bisect(_DEEP, depth)), at_any_depth), _LEAST), _MOST)

    def update(self, kind: GuessKind, q: float, depth: int, *, is_right: bool) -> None:
        """One guess was judged by the target."""
        place = bisect(_EDGES, q)
        for key in ((kind, place, None), (kind, place, bisect(_DEEP, depth))):
            counts = self._counts[key]
            fade = min(1.0, _MEMORY_GUESSES / (counts[0] + 1))
            counts[0] = counts[0] * fade + 1
            counts[1] = counts[1] * fade + is_right

    def _shrunk(self, key: tuple[GuessKind, int, int | None], prior: float) -> float:
        num, right = self._counts.get(key, (0.0, 0.0))
        return (right + _PRIOR_GUESSES * prior) / (num + _PRIOR_GUESSES)


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
