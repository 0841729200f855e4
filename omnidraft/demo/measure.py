"""A serving worker measured against plain decoding on the same prompts: interleaved at first, later against what plain
decoding took then."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from omnidraft.demo.openai_client import CHAT, OpenAIClient, Reply
from omnidraft.errors import RequestError

TIMEOUT_S = 600.0
Advance = Callable[[], None]


class ChatClient:
    """Sends chats of one message to a worker, at temperature 0 with a fixed seed."""

    def __init__(self, url: str, *, max_tokens: int) -> None:
        self._api = OpenAIClient(url, timeout_s=TIMEOUT_S)
        self._max_tokens = max_tokens

    def ask(
        self,
        prompt: str,
        *,
        store: bool,
        speculation: str = "auto",
        mode: str | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        """Return the answer with its decoding statistics. Raises ApiError, ConnectionLost."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens or self._max_tokens,
            "temperature": 0,
            "seed": 0,
            "store": store,
            "figures": True,
            "speculation": speculation,
            "mode": mode,
        }
        return self._api.ask(CHAT, body)


@dataclass(slots=True)
class SpeedComparison:
    """One snapshot against plain decoding."""

    version: int | None
    plain: list[Reply] = field(default_factory=list)
    drafted: list[Reply] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """The median over prompts of the ratio of tokens per second."""
        pairs = zip(self.drafted, self.plain, strict=True)
        return median(drafted.stats["tokens_per_s"] / plain.stats["tokens_per_s"] for drafted, plain in pairs)

    @property
    def num_identical(self) -> int:
        """The number of drafted texts that are plain decoding's."""
        return sum(drafted.text == plain.text for drafted, plain in zip(self.drafted, self.plain, strict=True))

    def row(self) -> dict[str, Any]:
        """Return the row of the report."""
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


def compare(client: ChatClient, prompts: Sequence[str], advance: Advance) -> SpeedComparison:
    """Decode each prompt plainly and with drafts; which of the two comes first alternates.

    Plain decoding is what people have without us: unpadded passes, nothing drafted.
    Raises RequestError without prompts.
    """
    comparison: SpeedComparison | None = None
    for number, prompt in enumerate(prompts):
        replies = {}
        for kind in ("plain", "drafted") if number % 2 == 0 else ("drafted", "plain"):
            if kind == "plain":
                replies[kind] = client.ask(prompt, store=False, speculation="off", mode="fast")
            else:
                replies[kind] = client.ask(prompt, store=False)
            advance()
        comparison = comparison or SpeedComparison(replies["drafted"].stats["snapshot_version"])
        comparison.plain.append(replies["plain"])
        comparison.drafted.append(replies["drafted"])
    if comparison is None:
        raise RequestError("there are no prompts to compare on")
    return comparison


def compare_again(
    client: ChatClient, prompts: Sequence[str], before: SpeedComparison, advance: Advance
) -> SpeedComparison:
    """Decode each prompt with drafts, and compare that with plain decoding as it was before: no snapshot changes it."""
    comparison = SpeedComparison(None, before.plain)
    for prompt in prompts:
        comparison.drafted.append(client.ask(prompt, store=False))
        advance()
    comparison.version = comparison.drafted[-1].stats["snapshot_version"]
    return comparison


def _ratio(replies: Sequence[Reply], above: str, below: str) -> float:
    return float(sum(reply.stats[above] for reply in replies) / max(sum(reply.stats[below] for reply in replies), 1e-9))
