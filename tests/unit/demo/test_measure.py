"""The demo's speed-up is that of the drafts, whatever the machine's own speed does, and a machine that moved is told.

A worker on a virtual clock: plain decoding takes 0.1 s a token, drafts make each question faster by a ratio of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median

import pytest
from fastapi import FastAPI, Request

from omnidraft.client import CHAT
from omnidraft.demo.measure import ChatClient, SpeedComparison, compare, median_interval, moved_speeds
from omnidraft.demo.report import table
from tests.http_server import served

RATIOS = {"a": 1.9, "b": 2.2, "c": 2.6, "d": 2.0, "e": 2.4, "f": 2.3}
ANSWER_S = 3.0
Speed = Callable[[float], float]
"""The machine's speed at a moment of the virtual clock, 1 where nobody else computes."""


def worker(speed: Speed) -> FastAPI:
    app = FastAPI()
    clock_s = 0.0

    @app.post(CHAT)
    async def chat(request: Request) -> dict[str, object]:
        nonlocal clock_s
        body = await request.json()
        ratio = 1.0 if body["speculation"] == "off" else RATIOS[body["messages"][0]["content"]]
        started_s, left = clock_s, 1.0
        while left > 0:
            left -= 0.01 * speed(clock_s) * ratio / ANSWER_S
            clock_s += 0.01
        took_s = clock_s - started_s
        stats = {"snapshot_version": 1, "num_tokens": 30, "num_later_tokens": 29, "num_passes": 10, "decode_s": took_s}
        shares = {"num_agreed": 19, "num_scored": 29, "draft_s": 0.0, "other_s": 0.0}
        return {
            "choices": [{"message": {"content": "the same"}}],
            "omnidraft": stats | shares | {"tokens_per_s": 29 / took_s},
        }

    return app


@pytest.fixture
def measured() -> Iterator[Callable[[Speed], list[SpeedComparison]]]:
    """Two versions measured one after the other, as the demo does."""
    with ExitStack() as servers:

        def measure(speed: Speed) -> list[SpeedComparison]:
            client = ChatClient(servers.enter_context(served(worker(speed))), max_tokens=30)
            return [compare(client, list(RATIOS), lambda: None) for _ in range(2)]

        yield measure


BUSY = {
    "in the whole first measurement": lambda clock_s: 0.5 if clock_s < 52 else 1.0,
    "in the middle of a pair": lambda clock_s: 0.5 if 6 < clock_s < 16 else 1.0,
    "in the second half of all": lambda clock_s: 0.5 if clock_s > 26 else 1.0,
    "more and more": lambda clock_s: 1 / (1 + clock_s / 60),
}


@pytest.mark.parametrize("when", BUSY)
def test_others_that_take_half_of_the_machine_change_no_speedup(
    when: str, measured: Callable[[Speed], list[SpeedComparison]]
) -> None:
    comparisons = measured(BUSY[when])
    for row in (each.row() for each in comparisons):
        low, high = row["speedup_interval"]
        assert low <= median(RATIOS.values()) <= high
        assert row["speedup"] == pytest.approx(median(RATIOS.values()), rel=0.1)
    slowest, fastest = moved_speeds(comparisons) or (0.0, 0.0)
    assert fastest > 1.4 * slowest > 0
    assert f"{slowest:.1f} to {fastest:.1f} tokens/s" in str(table([row], (slowest, fastest)).caption)


def test_a_quiet_machine_is_not_said_to_have_moved(measured: Callable[[Speed], list[SpeedComparison]]) -> None:
    assert moved_speeds(measured(lambda clock_s: 1 + 0.04 * (int(clock_s) % 3))) is None


def test_the_interval_has_the_median_of_nine_in_ten_draws_and_is_none_of_too_few() -> None:
    assert median_interval([3.0, 1.0, 2.0, 4.0]) is None
    assert median_interval([3.0, 1.0, 2.0, 5.0, 4.0]) == (1.0, 5.0)
    assert median_interval([float(number) for number in range(8)]) == (1.0, 6.0)
