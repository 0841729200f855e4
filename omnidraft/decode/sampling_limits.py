"""Which sampling settings can be served; every refusal names field, value and range. Grammars: see grammar.py."""

import math

from omnidraft.errors import RequestError
from omnidraft.ports import Sampling

MAX_TEMPERATURE = 100
MAX_PENALTY = 2
"""Presence and frequency, as OpenAI has it."""
MAX_REPETITION_PENALTY = 100
MAX_BIAS = 100


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises RequestError for the first setting out of its range, NaN among them."""
    warmth = sampling.temperature
    _require(0 <= warmth <= MAX_TEMPERATURE, "temperature", f"between 0 and {MAX_TEMPERATURE}", warmth)
    _require(sampling.top_k is None or sampling.top_k >= 1, "top_k", "at least 1", sampling.top_k)
    _require(sampling.top_p is None or 0 < sampling.top_p <= 1, "top_p", "above 0 and at most 1", sampling.top_p)
    _require(sampling.min_p is None or 0 <= sampling.min_p <= 1, "min_p", "between 0 and 1", sampling.min_p)
    _check_penalties(sampling)
    _check_bias(sampling, vocab_size)


def _check_penalties(sampling: Sampling) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(sampling, name)
        _require(abs(penalty) <= MAX_PENALTY, name, f"between -{MAX_PENALTY} and {MAX_PENALTY}", penalty)
    repetition, allowed = sampling.repetition_penalty, f"above 0 and at most {MAX_REPETITION_PENALTY}"
    _require(0 < repetition <= MAX_REPETITION_PENALTY, "repetition_penalty", allowed, repetition)


def _check_bias(sampling: Sampling, vocab_size: int) -> None:
    for token, bias in sampling.logit_bias.items():
        _require(0 <= token < vocab_size, "logit_bias", f"of ids from 0 to {vocab_size - 1}", token)
        is_allowed = math.isfinite(bias) and abs(bias) <= MAX_BIAS
        _require(is_allowed, f"logit_bias of {token}", f"between -{MAX_BIAS} and {MAX_BIAS}", bias)


def _require(kept: bool, field: str, allowed: str, value: float | None) -> None:
    if not kept:
        raise RequestError(f"{field} must be {allowed}, got {value}")
