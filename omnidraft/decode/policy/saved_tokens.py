"""What drafting a token now saves: no more than drafting it in the next pass would cost.

A token behind sure ones is as sure in the next pass, which drafts a chain of its like. Where rows cost their
arithmetic, that is little more than its row, while a draft now pays for the row whether the text reaches it or not: so
long chains are for passes whose rows are nearly free, and for texts that nothing is expected to turn aside.
"""

from collections.abc import Callable, Sequence
from functools import partial

_CHAIN_LENGTHS = (0, 1, 3, 7, 15, 31, 63)


def saved_tokens(
    values: Sequence[float],
    acceptances: Sequence[float],
    rate: float,
    pass_s: Callable[[int], float],
    num_drafted: int,
    num_texts: int,
) -> list[float]:
    """Return the seconds that these nodes save, in tokens at `rate`; `num_drafted` of the texts that share the target
    are drafted for."""
    chains_s = [pass_s(num_texts + num_drafted * length) for length in _CHAIN_LENGTHS]
    least_s = partial(_least_token_s, chains_s, num_drafted, num_texts)
    return [value * min(rate * least_s(each), 1.0) for value, each in zip(values, acceptances, strict=True)]


def _least_token_s(chains_s: Sequence[float], num_drafted: int, num_texts: int, acceptance: float) -> float:
    """Return the seconds of a token where chains of the best length are drafted, each of whose tokens is accepted with
    this probability."""
    if acceptance >= 1:
        reached = [float(length) for length in _CHAIN_LENGTHS]
    else:
        reached = [acceptance * (1 - acceptance**length) / (1 - acceptance) for length in _CHAIN_LENGTHS]
    return min(seconds / (num_texts + num_drafted * num) for seconds, num in zip(chains_s, reached, strict=True))
