"""The sampling settings of a request: one table, from which everything that repeats them is made.

`SamplingNumbers` is the table: each field has a row with its meaning and its bounds. From it come `Sampling`, which
decodes; the checks below; the fields of the three APIs (serving/strict_model.py); the options of `omnidraft generate`;
`SamplingParams` of the Python API; and the settings in trace records, with their wire format and their checks.

A new setting is a row here and its effect in decode/sampling/logits_pipeline.py. Where the drafter should know of it,
decode/drafting/ranking.py and distill/examples/acceptance_labels.py have the effect too.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, Literal, get_args

from omnidraft.errors import RequestError

Api = Literal["openai", "responses", "messages"]
"""OpenAI's completions and chat, its Responses, and Anthropic's Messages."""

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


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers from `lowest` to `highest`, none of them NaN or infinite."""

    lowest: float
    highest: float
    excludes_lowest: bool = False
    is_integer: bool = False

    def allow(self, value: Any) -> bool:
        """Return whether the value is a number within the bounds."""
        kind: Any = Integral if self.is_integer else Real
        if not isinstance(value, kind):
            return False
        is_within = self.lowest <= value <= self.highest and isfinite(value)
        return is_within and not (self.excludes_lowest and value == self.lowest)

    def __str__(self) -> str:
        if self.excludes_lowest:
            return f"above {self.lowest} and at most {self.highest}"
        return f"{'an integer ' if self.is_integer else ''}between {self.lowest} and {self.highest}"


@dataclass(frozen=True, slots=True)
class Row:
    """One setting: its meaning, the values that it may have, and who knows it; a default of None is off."""

    doc: str
    bounds: Bounds
    apis: tuple[Api, ...] = ("openai",)
    """Those that have it, all under its own name."""
    off: tuple[int, ...] = ()
    """Values that turn it off, as None does, where names and meanings are vLLM's."""
    recorded: Bounds | None = None
    """The bounds in trace records, where they are wider: other hosts serve what this one refuses."""


def _row(default: float | None, doc: str, bounds: Bounds, **more: Any) -> Any:
    return field(default=default, metadata={"row": Row(doc, bounds, **more)})


@dataclass(frozen=True, slots=True)
class SamplingNumbers:
    """The settings of a draw that are one number each."""

    temperature: float = _row(
        0.0,
        "0 takes the most probable token, the lowest id on a tie.",
        Bounds(0, MAX_TEMPERATURE),
        apis=get_args(Api),
        recorded=Bounds(0, inf),
    )
    _: KW_ONLY
    top_k: int | None = _row(
        None,
        "Draw from this many most probable tokens.",
        Bounds(1, MAX_COUNT, is_integer=True),
        apis=("openai", "messages"),
        off=(0, -1),
    )
    top_p: float | None = _row(
        None,
        "Draw from the most probable tokens of this mass.",
        Bounds(0, 1, excludes_lowest=True),
        apis=get_args(Api),
    )
    min_p: float | None = _row(
        None, "Draw from tokens of at least this share of the most probable one's probability.", Bounds(0, 1)
    )
    repetition_penalty: float = _row(
        1.0,
        "Above 1: less of what prompt or answer said. Positive logits of its ids are divided by it, others multiplied.",
        Bounds(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        recorded=Bounds(0, inf, excludes_lowest=True),
    )
    presence_penalty: float = _row(
        0.0,
        "Above 0: less of what the answer said. It is subtracted from the logit of each id of the answer.",
        Bounds(-MAX_PENALTY, MAX_PENALTY),
        recorded=Bounds(-inf, inf),
    )
    frequency_penalty: float = _row(
        0.0,
        "The same for each time it was said.",
        Bounds(-MAX_PENALTY, MAX_PENALTY),
        recorded=Bounds(-inf, inf),
    )


ROWS: Mapping[str, Row] = {each.name: each.metadata["row"] for each in fields(SamplingNumbers)}
"""The table, by the names of the fields."""
DEFAULTS = SamplingNumbers()
UNSAID = SamplingNumbers(1.0)
"""What requests of clients mean that do not say it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A schema or pattern that the whole text must match, or the form of answers that may call tools."""

    kind: Literal["json_schema", "regex", "tools"]
    text: str
    """The schema, the pattern, or what tools/grammar.py writes."""
    compiled: object | None = field(default=None, compare=False, repr=False)
    """The grammar compiled by decode/sampling/grammar.py; None: it is compiled when decoding begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(SamplingNumbers):
    """Processors of the target's distribution before a draw, applied in this order: penalties, bias, grammar,
    temperature, top-k, top-p, min-p."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids."""
    grammar: Grammar | None = None


def sampling_of(
    given: object,
    *,
    logit_bias: Mapping[int, float] | None = None,
    grammar: Grammar | None = None,
    defaults: SamplingNumbers = UNSAID,
) -> Sampling:
    """Return the settings that an object has as attributes of their names; those that are None or missing take the
    default."""
    numbers = numbers_of(defaults)
    for name, row in ROWS.items():
        value = getattr(given, name, None)
        if value is not None:
            numbers[name] = None if value in row.off else value
    return Sampling(**numbers, logit_bias=logit_bias or {}, grammar=grammar)


def given_grammar(
    json_schema: str | Mapping[str, Any] | None,
    regex: str | None,
    refusal: str = "give either json_schema or regex",
) -> Grammar | None:
    """Return the grammar of a client; None without one. Raises RequestError when there are two."""
    if json_schema is not None and regex is not None:
        raise RequestError(refusal)
    if json_schema is not None:
        return Grammar("json_schema", json_schema if isinstance(json_schema, str) else json.dumps(dict(json_schema)))
    return None if regex is None else Grammar("regex", regex)


def numbers_of(sampling: SamplingNumbers) -> dict[str, Any]:
    """Return the settings of the table by their names."""
    return {name: getattr(sampling, name) for name in ROWS}


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raise RequestError for the first setting that is no number in its range, NaN included."""
    for name, row in ROWS.items():
        value = getattr(sampling, name)
        if value is not None or getattr(DEFAULTS, name) is not None:
            _require(row.bounds.allow(value), name, row.bounds, value)
    biases, bounds = sampling.logit_bias, Bounds(-MAX_BIAS, MAX_BIAS)
    _require(isinstance(biases, Mapping), "logit_bias", "a bias for each of some ids", biases)
    for token, bias in biases.items():
        is_known = isinstance(token, Integral) and 0 <= token < vocab_size
        _require(is_known, "logit_bias", f"of ids from 0 to {vocab_size - 1}", token)
        _require(bounds.allow(bias), f"logit_bias of {token}", bounds, bias)


def require_integer(name: str, value: object, *, at_least: int) -> None:
    """Raise RequestError unless the value is an integer from `at_least` to MAX_COUNT."""
    bounds = Bounds(at_least, MAX_COUNT, is_integer=True)
    _require(bounds.allow(value), name, bounds, value)


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
    bounds = Bounds(MIN_SEED, MAX_SEED, is_integer=True)
    _require(bounds.allow(seed), "seed", bounds, seed)
    return seed % 2**64


def _require(is_valid: bool, name: str, allowed: object, value: object) -> None:
    if not is_valid:
        raise RequestError(f"{name} must be {allowed}, got {value}")
