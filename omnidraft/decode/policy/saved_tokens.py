"""What drafting a token now saves: no more than drafting it in the next pass would cost.

A token behind sure ones is as sure in the next pass, which drafts a chain of its like. Where rows cost their
arithmetic, that is little more than its row, while a draft now pays for the row whether the text reaches it or not: so
long chains are for passes whose rows are nearly free, and for texts that nothing is expected to turn aside.
"""

from collections.abc import Callable

_CHAIN_LENGTHS = (0, 1, 3, 7, 15, 31, 63)
_ALMOST_SURE = 1 - 1e-9


class SavedTokens:
    """Those of one round, in which `num_drafted` of the texts that share the target are drafted for."""

    def __init__(self, rate: float, pass_s: Callable[[int], float], num_drafted: int, num_texts: int) -> None:
        """`rate`: the tokens per second that saved seconds count for."""
        self._num_drafted, self._num_texts = num_drafted, num_texts
        self._worth = [(length, rate * pass_s(num_texts + num_drafted * length)) for length in _CHAIN_LENGTHS]
        self._shares = {0.0: 1.0}

    def share(self, acceptance: float) -> float:
        """Return the share of its value that a node saves whose like have this acceptance in the next pass: what a
        token costs in rounds that draft chains of them, as long as is best; 1 at most."""
        if acceptance not in self._shares:
            self._shares[acceptance] = self._computed(min(acceptance, _ALMOST_SURE))
        return self._shares[acceptance]

    def _computed(self, each: float) -> float:
        per_text = self._num_drafted * each / (1 - each)
        return min(1.0, *(worth / (self._num_texts + per_text * (1 - each**length)) for length, worth in self._worth))
