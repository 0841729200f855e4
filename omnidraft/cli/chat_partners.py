"""Who answers in a chat: an engine in this process, or a running server. Both tell who drafted each piece."""

import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import httpx

from omnidraft.client import CHAT, ApiError, OpenAIClient
from omnidraft.decode.drafted_spans import DraftedSpans
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import RequestError
from omnidraft.ports import Sampling

Message = Mapping[str, str]
Span = tuple[str, str | None]
"""A piece of an answer and the source that drafted it; None: the target drew it undrafted."""

_SCOPE = "chat"


class Partner(Protocol):
    """Answers conversations."""

    @property
    def name(self) -> str:
        """The model that answers."""

    @property
    def summary(self) -> str:
        """The effect of speculation on the last answer, in a line."""

    def answer(self, messages: Sequence[Message]) -> Generator[Span, None, None]:
        """Yield an answer piece by piece. Closing the generator ends it early. Raises OmnidraftError."""

    def close(self) -> None:
        """Free what it holds."""


class LocalPartner:
    """An engine that decodes for this chat alone; a turn reads only what is new since the last one."""

    def __init__(self, engine: Engine, *, temperature: float, seed: int | None, max_new_tokens: int | None) -> None:
        self._engine = engine
        self._sampling, self._seed, self._max_new_tokens = Sampling(temperature), seed, max_new_tokens
        self._stats = DecodeStats()
        self.name = engine.pair.target

    @property
    def summary(self) -> str:
        return summary_line(self._stats.summary())

    def answer(self, messages: Sequence[Message]) -> Generator[Span, None, None]:
        request = GenerationRequest(
            messages=list(messages), sampling=self._sampling, seed=self._seed, max_new_tokens=self._max_new_tokens
        )
        self._stats = DecodeStats()
        spans = DraftedSpans(self._engine.pair.target_tokenizer.vocabulary)
        generation = self._engine.add_request(request, client=_SCOPE, cache_scope=_SCOPE)
        try:
            while not generation.is_over:
                yield from self._round(spans)
        finally:
            self._engine.abort(generation)

    def close(self) -> None:
        self._engine.decoder.close()

    def _round(self, spans: DraftedSpans) -> Iterator[Span]:
        with _interrupted_afterwards():
            outputs = self._engine.step()
        for output in outputs:
            if output.error is not None:
                raise output.error
            if output.step is not None:
                self._stats.take(output.step)
                yield from ((span.text, span.source) for span in spans.take(output.step))


class ServerPartner:
    """A server of ours."""

    def __init__(
        self,
        url: str,
        model: str | None,
        key: str | None,
        *,
        temperature: float,
        seed: int | None,
        max_new_tokens: int | None,
    ) -> None:
        """Raises ApiError."""
        self._api = OpenAIClient(_base_url(url), timeout_s=None, key=key)
        self.name = model or self._first_model()
        self._body = {"model": self.name, "temperature": temperature, "seed": seed, "max_tokens": max_new_tokens}
        self.summary = ""

    def answer(self, messages: Sequence[Message]) -> Generator[Span, None, None]:
        for event in self._api.stream(CHAT, self._body | {"messages": list(messages), "figures": True}):
            if "omnidraft" in event:
                self.summary = summary_line(event["omnidraft"])
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                spans = choice.get("drafted_by") or ([(text, None)] if text else ())
                yield from ((piece, source) for piece, source in spans)

    def close(self) -> None:
        self._api.close()

    def _first_model(self) -> str:
        names = self._api.models()
        if not names:
            raise ApiError("the server has no model")
        return names[0]


@contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Hold Ctrl-C back until the end: half a round would leave the engine's keys in disorder."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt


def summary_line(stats: Mapping[str, Any]) -> str:
    """Return the statistics of an answer in a line."""
    agreement = "-" if stats["agreement"] is None else f"{stats['agreement']:.2f}"
    return (
        f"{stats['num_tokens']} tokens, {stats['tokens_per_s']:.1f} tokens/s, {stats['tokens_per_pass']:.2f} tokens "
        f"per target pass, agreement {agreement}"
    )


def _base_url(url: str) -> str:
    """Return the URL without a path of OpenAI's base URLs."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise RequestError(f"--url: {exc}") from exc
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RequestError(f"--url must be like http://127.0.0.1:8000, got {url!r}")
    return url.rstrip("/").removesuffix("/v1")
