"""Measure a serving worker against plain decoding, interleaved, on the same questions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

from pipelines.lib.local_cluster import ServiceFailed

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer and what it cost."""

    text: str
    figures: dict[str, Any]

    @property
    def version(self) -> int | None:
        version: int | None = self.figures["snapshot_version"]
        return version


class Client:
    """Asks a worker over HTTP."""

    def __init__(self, url: str, *, max_tokens: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        self._max_tokens = max_tokens

    def ask(
        self,
        question: str,
        *,
        store: bool,
        speculation: str = "auto",
        mode: str | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        """Temperature 0, one fixed seed."""
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens or self._max_tokens,
            "temperature": 0,
            "seed": 0,
            "store": store,
            "figures": True,
            "speculation": speculation,
            "mode": mode,
        }
        response = self._http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise ServiceFailed(f"the worker answered {response.status_code}: {response.text[:300]}")
        content = response.json()
        return Reply(content["choices"][0]["message"]["content"], content["omnidraft"])


@dataclass(slots=True)
class SpeedComparison:
    """One snapshot against plain decoding."""

    version: int | None
    plain: list[Reply] = field(default_factory=list)
    drafted: list[Reply] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Median over questions of the ratio of tokens per second."""
        pairs = zip(self.drafted, self.plain, strict=True)
        return median(drafted.figures["tokens_per_s"] / plain.figures["tokens_per_s"] for drafted, plain in pairs)

    def row(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {
            "version": self.version,
            "agreement": _ratio(self.drafted, "num_agreed", "num_scored"),
            "tokens_per_pass": _ratio(self.drafted, "num_tokens", "num_passes"),
            "tokens_per_s": _ratio(self.drafted, "num_later_tokens", "decode_s"),
            "plain_tokens_per_s": _ratio(self.plain, "num_later_tokens", "decode_s"),
            "speedup": self.speedup,
            "draft_share": _ratio(self.drafted, "draft_s", "decode_s"),
            "overhead_share": _ratio(self.drafted, "other_s", "decode_s"),
        }


def compare(client: Client, questions: Sequence[str], advance: Callable[[], None]) -> SpeedComparison:
    """Plain and drafted in turn, question by question; the first of the pair alternates.

    Plain is what people have without us: unpadded passes, nothing drafted.
    """
    comparison: SpeedComparison | None = None
    for number, question in enumerate(questions):
        replies = {}
        for kind in ("plain", "drafted") if number % 2 == 0 else ("drafted", "plain"):
            if kind == "plain":
                replies[kind] = client.ask(question, store=False, speculation="off", mode="fast")
            else:
                replies[kind] = client.ask(question, store=False)
            advance()
        comparison = comparison or SpeedComparison(replies["drafted"].version)
        comparison.plain.append(replies["plain"])
        comparison.drafted.append(replies["drafted"])
    if comparison is None:
        raise ServiceFailed("there are no questions to compare on")
    return comparison


def _ratio(replies: Sequence[Reply], above: str, below: str) -> float:
    return float(
        sum(reply.figures[above] for reply in replies) / max(sum(reply.figures[below] for reply in replies), 1e-9)
    )
