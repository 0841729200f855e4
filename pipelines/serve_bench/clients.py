"""Clients of all kinds in front of one server: whole, streamed, several choices, log-probabilities, gone in between."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TIMEOUT_S = 120.0
OPENINGS = ("How many clips in", "A robe takes", "Numbers:", "Natalia sold")
SHOWN = 20


@dataclass(slots=True)
class ClientTally:
    """What all clients have seen."""

    by_kind: Counter[str] = field(default_factory=Counter)
    """Answers, by what was asked."""
    num_refused: int = 0
    """429s that said when to come again."""
    errors: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    """Of whole answers and streams that came to their end, waiting in line included."""
    texts: dict[str, str] = field(default_factory=dict)
    """The answer to each question, which must not change."""
    num_tokens: int = 0


class Refused(Exception):
    """The queue is full."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class Wrong(Exception):
    """An answer that should not have come."""


class Client:
    """Asks without end, one question after another."""

    def __init__(self, http: httpx.AsyncClient, tally: ClientTally, seed: int) -> None:
        self._http, self._tally, self._dice = http, tally, random.Random(seed)
        self._kinds: dict[str, Callable[[dict[str, Any]], Coroutine[Any, Any, None]]] = {
            "whole": self._whole,
            "streamed": self._streamed,
            "log-probabilities": self._log_probs,
            "two choices": self._two_choices,
            "gone": self._gone,
        }

    async def ask_until(self, end_s: float) -> None:
        """That moment of the monotonic clock."""
        while time.monotonic() < end_s:
            kind = self._dice.choice(list(self._kinds))
            try:
                await self._kinds[kind](self._question())
                self._tally.by_kind[kind] += 1
            except Refused as exc:
                self._tally.num_refused += 1
                await asyncio.sleep(min(exc.retry_after_s, max(0.0, end_s - time.monotonic())))
            except (Wrong, httpx.HTTPError, ValueError, KeyError) as exc:
                if len(self._tally.errors) < SHOWN:
                    self._tally.errors.append(f"{kind}: {type(exc).__name__}: {exc}")
                else:
                    self._tally.errors.append(kind)

    def _question(self) -> dict[str, Any]:
        opening, number = self._dice.choice(OPENINGS), self._dice.randrange(12)
        return {"max_tokens": 8 + 2 * number, "temperature": 1.0, "seed": number, "asked": f"{opening} {number}"}

    async def _whole(self, question: dict[str, Any]) -> None:
        asked = question.pop("asked")
        started = time.monotonic()
        said = await self._post(CHAT, question | {"messages": [{"role": "user", "content": asked}]})
        self._answered(f"{CHAT} {asked}", said["choices"][0]["message"]["content"], started, said["usage"])

    async def _streamed(self, question: dict[str, Any]) -> None:
        asked = question.pop("asked")
        body = question | {"messages": [{"role": "user", "content": asked}]}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        started, text, usage, is_done = time.monotonic(), "", None, False
        async with self._http.stream("POST", CHAT, json=body) as response:
            await _check(response)
            async for line in response.aiter_lines():
                is_done |= line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise Wrong(event["error"]["message"])
                text += "".join(choice["delta"]["content"] for choice in event["choices"])
                usage = event["usage"]
        if usage is None or not is_done:
            raise Wrong("the stream broke off")
        self._answered(f"{CHAT} {asked}", text, started, usage)

    async def _log_probs(self, question: dict[str, Any]) -> None:
        asked = question.pop("asked")
        started = time.monotonic()
        said = await self._post(COMPLETION, question | {"prompt": asked, "logprobs": 5})
        (choice,) = said["choices"]
        if choice["text"] and not choice["logprobs"]["tokens"]:
            raise Wrong("no log-probabilities")
        self._answered(f"{COMPLETION} {asked}", choice["text"], started, said["usage"])

    async def _two_choices(self, question: dict[str, Any]) -> None:
        asked = question.pop("asked")
        started = time.monotonic()
        said = await self._post(COMPLETION, question | {"prompt": asked, "n": 2})
        first, _ = said["choices"]
        self._answered(f"{COMPLETION} {asked}", first["text"], started, said["usage"])

    async def _gone(self, question: dict[str, Any]) -> None:
        """Leaves after the first event."""
        asked = question.pop("asked")
        body = question | {"prompt": asked, "stream": True, "max_tokens": 200}
        async with self._http.stream("POST", COMPLETION, json=body) as response:
            await _check(response)
            await anext(response.aiter_lines())

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._http.post(path, json=body)
        await _check(response)
        said: dict[str, Any] = response.json()
        return said

    def _answered(self, question: str, text: str, started: float, usage: dict[str, int]) -> None:
        self._tally.latencies_s.append(time.monotonic() - started)
        self._tally.num_tokens += usage["completion_tokens"]
        if self._tally.texts.setdefault(question, text) != text:
            raise Wrong(f"{question!r} was answered with {text!r} and {self._tally.texts[question]!r}")


async def _check(response: httpx.Response) -> None:
    """Raises Refused for a 429 that says when to come again, Wrong for anything but a 200."""
    retry_after = response.headers.get("retry-after", "")
    if response.status_code == 429 and retry_after.isdigit() and int(retry_after) >= 1:
        raise Refused(float(retry_after))
    if response.status_code != 200:
        raise Wrong(f"status {response.status_code}: {(await response.aread())[:200]!r}")


async def ask_all(url: str, num: int, seconds: float, tally: ClientTally, seed: int) -> None:
    """So many clients, each with a connection of its own, for so long."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:
        end_s = time.monotonic() + seconds
        await asyncio.gather(*[Client(http, tally, seed + number).ask_until(end_s) for number in range(num)])
