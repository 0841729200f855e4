"""What drafting a token now saves: no more than drafting it in the next pass would cost.

A token behind sure ones is as sure in the next pass, which drafts a chain of its like. Where rows cost their
arithmetic, that is little more than its row, while a draft now pays for the row whether the text reaches it or not: so
long chains are for passes whose rows are nearly free, and for texts that nothing is expected to turn aside.
"""

from collections.abc import Callable
from functools import cache

_CHAIN_LENGTHS = (0, 1, 3, 7, 15, 31, 63)
_ALMOST_SURE = 1 - 1e-9


def saved_share(
    rate: float, pass_s: Callable[[int], float], num_drafted: int, num_texts: int
) -> Callable[[float], float]:
    """Return what tells the share of its value that a node saves whose like have some acceptance in the next pass: what
    a token costs in rounds that draft chains of them, as long as is best; 1 at most. In the round `num_drafted` of the
    texts that share the target are drafted for, and a saved second counts for `rate` tokens."""
    worth = [(length, rate * pass_s(num_texts + num_drafted * length)) for length in _CHAIN_LENGTHS]

    @cache
    def share(acceptance: float) -> float:
        if not acceptance:
            return 1.0
        each = min(acceptance, _ALMOST_SURE)
        per_text = num_drafted * each / (1 - each)
        return min(1.0, *(tokens / (num_texts + per_text * (1 - each**length)) for length, tokens in worth))

    return share
