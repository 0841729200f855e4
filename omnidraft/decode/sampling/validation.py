"""Bounds of the sampling settings that can be served; every refusal names field, value and range.

Served settings can be recorded: no range here is wider than that of traces/schema.py and traces/checks.py. Grammars
have bounds of their own: see input_limits.py.
"""

from collections.abc import Iterable, Mapping
from numbers import Integral, Real

from omnidraft.errors import RequestError
from omnidraft.ports import Sampling

MAX_TEMPERATURE = 100
MAX_PENALTY = 2
"""Presence and frequency penalty, as in OpenAI's API."""
MIN_REPETITION_PENALTY = 0.01
"""Much smaller ones produce logits that overflow."""
MAX_REPETITION_PENALTY = 100
MAX_BIAS = 100
MAX_COUNT = 2**31 - 1
"""The largest count that a request may name, such as `top_k`."""
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
"""A negative seed is the unsigned 64 bit number with the same bits."""


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raise RequestError for the first setting that is no number in its range, NaN included."""
    _require_between("temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    if sampling.top_k is not None:
        require_integer("top_k", sampling.top_k, at_least=1)
    if sampling.top_p is not None:
        _require_between("top_p", sampling.top_p, 0, 1)
        _require(sampling.top_p > 0, "top_p", "above 0 and at most 1", sampling.top_p)
    if sampling.min_p is not None:
        _require_between("min_p", sampling.min_p, 0, 1)
    _check_penalties(sampling)
    _check_bias(sampling, vocab_size)


def require_integer(field: str, value: int, *, at_least: int) -> None:
    """Raise RequestError unless the value is an integer from `at_least` to MAX_COUNT."""
    is_valid = isinstance(value, Integral) and at_least <= value <= MAX_COUNT
    _require(is_valid, field, f"an integer between {at_least} and {MAX_COUNT}", value)


def effective_top_k(top_k: int | None) -> int | None:
    """Return the number of most probable tokens that are kept; None for vLLM's 0 and -1, which keep all of them."""
    return None if top_k in (0, -1) else top_k


def require_text(texts: Mapping[str, Iterable[str]]) -> None:
    """Raise RequestError for what is no text, or has half of a surrogate pair, which nothing can encode."""
    for name, strings in texts.items():
        for text in strings:
            if not isinstance(text, str):
                raise RequestError(f"{name} must be text, got {text}")
            try:
                text.encode()
            except UnicodeEncodeError as exc:
                raise RequestError(f"{name}: character {exc.start} is half of a surrogate pair, not text") from exc


def unsigned_seed(seed: int) -> int:
    """Return the seed as trace records hold it, in 64 unsigned bits. Raises RequestError beyond 64 bits."""
    is_valid = isinstance(seed, Integral) and MIN_SEED <= seed <= MAX_SEED
    _require(is_valid, "seed", f"an integer between {MIN_SEED} and {MAX_SEED}", seed)
    return seed % 2**64


def _check_penalties(sampling: Sampling) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        _require_between(name, getattr(sampling, name), -MAX_PENALTY, MAX_PENALTY)
    _require_between("repetition_penalty", sampling.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)


def _check_bias(sampling: Sampling, vocab_size: int) -> None:
    _require(isinstance(sampling.logit_bias, Mapping), "logit_bias", "a bias for each of some ids", sampling.logit_bias)
    for token, bias in sampling.logit_bias.items():
        is_known = isinstance(token, Integral) and 0 <= token < vocab_size
        _require(is_known, "logit_bias", f"of ids from 0 to {vocab_size - 1}", token)
        _require_between(f"logit_bias of {token}", bias, -MAX_BIAS, MAX_BIAS)


def _require_between(field: str, value: object, lowest: float, highest: float) -> None:
    is_valid = isinstance(value, Real) and lowest <= float(value) <= highest
    _require(is_valid, field, f"between {lowest} and {highest}", value)


def _require(is_valid: bool, field: str, allowed: str, value: object) -> None:
    if not is_valid:
        raise RequestError(f"{field} must be {allowed}, got {value}")
