"""What drafting a token now saves: no more than drafting it in the next pass would cost.

A token behind sure ones is as sure in the next pass, which drafts a chain of its like. Where rows cost their
arithmetic, that is little more than its row, while a draft now pays for the row whether the text reaches it or not: so
long chains are for passes whose rows are nearly free, and for texts that nothing is expected to turn aside.
"""

from collections.abc import Callable, Sequence

import numpy as np

_CHAIN_LENGTHS = np.array([0, 1, 3, 7, 15, 31, 63])
_ALMOST_SURE = 1 - 1e-9


def saved_tokens(
    values: Sequence[float],
    acceptances: Sequence[float],
    rate: float,
    pass_s: Callable[[int], float],
    num_drafted: int,
    num_texts: int,
) -> list[float]:
    """Return the seconds that these nodes save, in tokens at `rate`: each those of a token in rounds that draft chains
    of its acceptance, as long as is best, for `num_drafted` of the texts that share the target; 1 / `rate` at most."""
    if not any(acceptances):
        return list(values)
    seconds = np.array([pass_s(num_texts + num_drafted * int(length)) for length in _CHAIN_LENGTHS])
    each = np.minimum(acceptances, _ALMOST_SURE)[:, None]
    tokens = num_texts + num_drafted * each * (1 - each**_CHAIN_LENGTHS) / (1 - each)
    saved: list[float] = (np.minimum(rate * (seconds / tokens).min(axis=1), 1.0) * values).tolist()
    return saved
