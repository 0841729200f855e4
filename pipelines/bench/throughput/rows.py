"""The figures of one system under one number of clients, from what its clients received."""

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any

from pipelines.bench.throughput.clients import CountTokens, Tally

Row = dict[str, Any]
_SHOWN_ERRORS = 5


def row(system: str, num_clients: int, tally: Tally, count_tokens: CountTokens) -> Row:
    """Return the row of a measurement.

    `tokens_per_s` is the completion tokens of all clients over the time from the first request to the end of the last
    answer.
    """
    answers = tally.answers
    num_tokens = sum(answer.num_tokens(count_tokens) for answer in answers)
    wall_s = max(each.ended_s for each in answers) - min(each.sent_s for each in answers) if answers else 0.0
    gaps = [gap for answer in answers for gap in answer.token_gaps(count_tokens)]
    return {
        "system": system,
        "clients": num_clients,
        "fingerprints": sorted({each.fingerprint for each in answers if each.fingerprint}),
        "tokens_per_s": num_tokens / wall_s if wall_s else None,
        "first_token_s": spread([each.first_token_s for each in answers if each.first_token_s is not None]),
        "gap_s": spread(gaps),
        "requests": len(answers) + len(tally.errors),
        "tokens": num_tokens,
        "prompt_tokens": sum(answer.usage.get("prompt_tokens", 0) for answer in answers),
        "cached_tokens": sum(cached_tokens(answer.usage) for answer in answers),
        "wall_s": wall_s,
        "num_errors": len(tally.errors),
        "errors": list(dict.fromkeys(tally.errors))[:_SHOWN_ERRORS],
    }


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the 99th percentile: the smallest value that 99 % of them do not exceed."""
    if not seconds:
        return {"median": None, "p99": None}
    return {"median": median(seconds), "p99": sorted(seconds)[ceil(0.99 * len(seconds)) - 1]}


def cached_tokens(usage: Mapping[str, Any]) -> int:
    """Return the prompt tokens whose keys the server had, by its usage."""
    details = usage.get("prompt_tokens_details") or {}
    num: int = details.get("cached_tokens") or 0
    return num
