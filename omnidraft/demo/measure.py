"""A serving worker measured against plain decoding on the same prompts, in turn, so that both meet the same machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import median
from typing import Any

from omnidraft.client import CHAT, OpenAIClient, Reply
from omnidraft.errors import RequestError

TIMEOUT_S = 600.0
CONFIDENCE = 0.9
"""The least probability with which a speed-up's interval has the median of all prompts like these."""
STEADY_RATIO = 1.2
"""Plain answers of one model differ less in speed than this, unless the machine itself gets slower or faster."""
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
    def ratios(self) -> list[float]:
        """Each prompt's tokens per second with drafts over those of plain decoding just before or after."""
        pairs = zip(self.drafted, self.plain, strict=True)
        return [drafted.stats["tokens_per_s"] / plain.stats["tokens_per_s"] for drafted, plain in pairs]

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
            "speedup": median(self.ratios),
            "speedup_interval": median_interval(self.ratios),
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


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the values between which the median of what they were drawn from lies with CONFIDENCE.

    The sign test's interval, which holds for every distribution (Conover, Practical Nonparametric Statistics, 3.2).

    Returns:
        None where there are too few values for any.
    """
    ordered, beyond, interval = sorted(values), 0.0, None
    for index in range(len(ordered) // 2):
        beyond += 2 * comb(len(ordered), index) / 2 ** len(ordered)
        if beyond <= 1 - CONFIDENCE:
            interval = ordered[index], ordered[-1 - index]
    return interval


def moved_speeds(measured: Sequence[SpeedComparison]) -> tuple[float, float] | None:
    """Return the least and most tokens per second of plain decoding, where only a machine that moved explains both."""
    speeds = [plain.stats["tokens_per_s"] for each in measured for plain in each.plain]
    return (min(speeds), max(speeds)) if max(speeds) > STEADY_RATIO * min(speeds) else None


def _ratio(replies: Sequence[Reply], above: str, below: str) -> float:
    return float(sum(reply.stats[above] for reply in replies) / max(sum(reply.stats[below] for reply in replies), 1e-9))
