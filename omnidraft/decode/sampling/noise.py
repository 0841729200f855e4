"""All randomness of a text: one 64-bit Philox word per (seed, choice, position, token id).

A token wins the exponential race, x = argmin_t E_t / p(t), with probability p(t). Because E depends on nothing else, a
text depends on its seed and the target alone, never on the drafts. See docs/algorithms.md section 3.
Sources: Philox, Salmon et al. 2011 (numpy's generator); the race has the distribution of Gumbel-max, Maddison et al.
2014; coupling without communication, Daliri et al., https://arxiv.org/abs/2408.07978.
Shapes: M ids that take part, V the vocabulary.
"""

import hashlib

import numpy as np

from omnidraft.errors import ContractError

_UNIT = 2.0**-52
_ONE = np.float64(1).view(np.uint64)
_CACHED_POSITIONS = 32
"""The most that are cached, for drafts far ahead of the text."""
_ROUNDING_MARGIN = 1 + 2.0**-50


class SeededNoise:
    """Implements ports.Noise. Words of positions still to be drawn are cached: proposer and target read the same."""

    def __init__(self, seed: int, choice: int, vocab_size: int) -> None:
        self._key = np.array([seed % 2**64, choice], dtype=np.uint64)
        self._vocab_size = vocab_size
        self._uniforms: dict[int, np.ndarray] = {}

    def draw(self, ids_M: np.ndarray, p_M: np.ndarray, position: int) -> int:
        """Return the winner of the race; the lowest id on a tie. A single id wins without a race.

        Only ids whose uniform lies below E/p of the most probable id times their own p can win, since u <= E(u);
        logarithms are computed for those alone.
        """
        if len(ids_M) == 1:
            return int(ids_M[0])
        for past in [each for each in self._uniforms if each < position]:
            del self._uniforms[past]  # a text never goes back, and each has V numbers
        u_M = self._uniforms_at(position)[ids_M]
        best = int(np.argmax(p_M))
        bound = -np.log1p(-u_M[best]) / p_M[best]
        rivals = np.flatnonzero(u_M <= bound * _ROUNDING_MARGIN * p_M)
        times = -np.log1p(-u_M[rivals]) / p_M[rivals]
        return int(ids_M[rivals[np.flatnonzero(times == times.min())]].min())

    def exponentials(self, position: int, ids: np.ndarray) -> np.ndarray:
        """Return E ~ Exp(1) of these ids at this position."""
        exponentials: np.ndarray = -np.log1p(-self._uniforms_at(position)[ids])
        return exponentials

    def _uniforms_at(self, position: int) -> np.ndarray:
        """Return a number between 0 and 1 for every id. [V]"""
        if position not in self._uniforms:
            while len(self._uniforms) >= _CACHED_POSITIONS:
                del self._uniforms[min(self._uniforms)]
            words = np.random.Philox(key=self._key, counter=[0, position, 0, 0]).random_raw(self._vocab_size)
            self._uniforms[position] = uniform_of(words)
        return self._uniforms[position]


class ForbiddenNoise:
    """Implements ports.Noise for an engine that draws with its own noise, which proposers must not use."""

    def draw(self, ids_M: np.ndarray, p_M: np.ndarray, position: int) -> int:
        """Raise ContractError."""
        raise ContractError("the engine draws with its own noise, which is unknown here")

    def exponentials(self, position: int, ids: np.ndarray) -> np.ndarray:
        """Raise ContractError."""
        raise ContractError("the engine draws with its own noise, which is unknown here")


def uniform_of(words: np.ndarray) -> np.ndarray:
    """Return u = ((word >> 12) + 1/2) / 2^52: exact in float64 (with one bit more it is not), so never 0 and never 1.

    The bits of (word >> 12) become the fraction of a number from 1 to 2, in place.
    """
    words >>= np.uint64(12)
    words |= _ONE
    u: np.ndarray = words.view(np.float64)
    u -= 1 - _UNIT / 2
    return u


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a choice: the request's own for the first, 53 bits of a hash for the others, as many as
    JavaScript's numbers hold."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{choice}".encode()).digest()[:8], "big") >> 11
