"""Retries go on until the action succeeds, count every failure, and end with its error once `stop` holds."""

import time
from itertools import pairwise

import pytest

from omnidraft.distill.retrying import retry, wait
from omnidraft.errors import BusError, ConfigError


class Failing:
    """An action that fails so many times."""

    def __init__(self, num_failures: int, error: Exception) -> None:
        self.num_calls, self._num_failures, self._error = 0, num_failures, error

    def __call__(self) -> int:
        self.num_calls += 1
        if self.num_calls <= self._num_failures:
            raise self._error
        return self.num_calls


def test_every_failure_is_counted_and_logged_with_the_wait_and_the_waits_grow(caplog) -> None:
    events: list[float | str] = []
    action = Failing(7, BusError("log away"))
    num_calls = retry(
        action,
        lambda: False,
        lambda: events.append("failed"),
        lambda: events.append("other work"),
        wait=lambda seconds, stop: events.append(seconds),
    )
    assert num_calls == 8
    assert events.count("failed") == 7
    waits_s = [0.5, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0]
    slept_s = " ".join(map(str, events)).split("failed")[1:]
    assert [sum(map(float, each.replace("other work", "").split())) for each in slept_s] == waits_s
    assert max(each for each in events if isinstance(each, float)) == 2.0
    assert all(after == "other work" for each, after in pairwise(events) if isinstance(each, float))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"trying again in {wait_s} s: log away" for wait_s in waits_s]


def test_stop_ends_a_long_wait_at_once_with_the_actions_own_error() -> None:
    action, failures, started_s = Failing(99, BusError("log away")), [], time.monotonic()
    with pytest.raises(BusError, match="log away"):
        retry(
            action,
            lambda: time.monotonic() - started_s > 0.2,
            lambda: failures.append(None),
            wait=lambda seconds, stop: wait(60.0, stop),
        )
    assert time.monotonic() - started_s < 10
    assert len(failures) == action.num_calls == 2


def test_an_error_that_no_retry_mends_is_raised_at_once() -> None:
    action, failures = Failing(1, ConfigError("wrong")), []
    with pytest.raises(ConfigError):
        retry(action, lambda: False, lambda: failures.append(None))
    assert (action.num_calls, failures) == (1, [])
