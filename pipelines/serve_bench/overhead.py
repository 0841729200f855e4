"""What HTTP adds to the library call: the same questions to both, interleaved, one at a time, and medians.

The client is the standard library's, in this process, with one connection that stays open: what it takes to write a
request and read an answer counts as the server's.
"""

import http.client
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from omnidraft import wiring
from omnidraft.decode.engine import Engine, GenerationRequest
from omnidraft.ports import Sampling
from omnidraft.telemetry.metrics import CountingMetrics
from pipelines.bench.runs import rotated
from pipelines.lib.check_result import CheckResult
from pipelines.lib.progress import bar
from pipelines.lib.report import ms
from pipelines.serve_bench.server import ServeBenchPlan, Server, serving

REQUEST_MS, TOKEN_MS = 2.0, 0.2
PROMPT = "How many clips did Natalia sell"
WARM_UP = 3

Ask = Callable[[], str]
"""One way to get the text."""


def run(plan: ServeBenchPlan) -> CheckResult:
    """Seconds of each way, and of what HTTP adds, question by question."""
    with serving(plan, "overhead", "[recorder]\nenabled = false") as server:
        engine = wiring.engine(server.settings, CountingMetrics()).engine
        ways = _ways(engine, server, plan.tokens)
        seconds, texts = _measure(ways, plan.repeats)
    figures = figures_of(seconds, plan.tokens)
    figures["same_text"] = texts["library"] == texts["whole"] == texts["streamed"]
    return CheckResult(figures, promises(figures))


def promises(figures: dict[str, Any]) -> dict[str, bool]:
    """From the figures of this part."""
    return {
        f"HTTP adds at most {REQUEST_MS:g} ms to a request": figures["request_ms"] <= REQUEST_MS,
        f"HTTP adds at most {TOKEN_MS:g} ms to a token of a stream": figures["streamed_token_ms"] <= TOKEN_MS,
        f"HTTP adds at most {TOKEN_MS:g} ms to a token of a whole answer": figures["whole_token_ms"] <= TOKEN_MS,
        "the text over HTTP is the library's": figures["same_text"],
    }


def _ways(engine: Engine, server: Server, tokens: int) -> dict[str, Ask]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    return {
        "library, 1 token": lambda: _library(engine, 1),
        "whole, 1 token": lambda: _whole(connection, 1),
        "streamed, 1 token": lambda: _streamed(connection, 1),
        "library": lambda: _library(engine, tokens),
        "whole": lambda: _whole(connection, tokens),
        "streamed": lambda: _streamed(connection, tokens),
    }


def _measure(ways: dict[str, Ask], repeats: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    seconds: dict[str, list[float]] = defaultdict(list)
    texts: dict[str, str] = {}
    with bar("overhead", (repeats + WARM_UP) * len(ways)) as advance:
        for number in range(repeats + WARM_UP):
            for name in rotated(list(ways), number):
                started = time.perf_counter()
                texts[name] = ways[name]()
                took_s = time.perf_counter() - started
                if number >= WARM_UP:
                    seconds[name].append(took_s)
                advance()
    return seconds, texts


def figures_of(seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Medians, and of paired differences; for the report."""

    def added(way: str, library: str) -> float:
        pairs = zip(seconds[way], seconds[library], strict=True)
        return median(way_s - library_s for way_s, library_s in pairs)

    short = "library, 1 token"
    request_s = {way: added(f"{way}, 1 token", short) for way in ("whole", "streamed")}
    token_s = {way: (added(way, "library") - request_s[way]) / (tokens - 1) for way in ("whole", "streamed")}
    return {
        "tokens": tokens,
        "repeats": len(seconds["library"]),
        "request_ms": ms(max(request_s.values())),
        "whole_request_ms": ms(request_s["whole"]),
        "streamed_request_ms": ms(request_s["streamed"]),
        "whole_token_ms": ms(token_s["whole"]),
        "streamed_token_ms": ms(token_s["streamed"]),
        "medians_ms": {name: ms(median(took)) for name, took in seconds.items()},
    }


def _library(engine: Engine, tokens: int) -> str:
    question = GenerationRequest(prompt=PROMPT, max_new_tokens=tokens, sampling=Sampling(0.0), seed=0, is_stored=False)
    return "".join(step.text for step in engine.stream(question).steps)


def _body(tokens: int, *, stream: bool) -> bytes:
    asked = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "seed": 0, "store": False, "stream": stream}
    return json.dumps(asked).encode()


def _post(connection: http.client.HTTPConnection, body: bytes) -> http.client.HTTPResponse:
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection.getresponse()


def _whole(connection: http.client.HTTPConnection, tokens: int) -> str:
    answer = json.loads(_post(connection, _body(tokens, stream=False)).read())
    text: str = answer["choices"][0]["text"]
    return text


def _streamed(connection: http.client.HTTPConnection, tokens: int) -> str:
    return "".join(_texts(_post(connection, _body(tokens, stream=True))))


def _texts(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])["choices"][0]["text"]
