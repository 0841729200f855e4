"""The distiller's supervision of its actors, without a cluster."""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnidraft import config
from omnidraft.errors import ConfigError
from omnidraft.hosts import distiller
from omnidraft.hosts.distiller import LOST_S, STOP_S, _LearnerActor, _watch

STATUS = {
    "pid": 7,
    "memory_bytes": 5 << 30,
    "available_bytes": 3 << 28,
    "metrics": "figures",
    "warnings": [(logging.WARNING, "the newest snapshot is not published")],
    "version": None,
    "num_records": 0,
    "num_tokens": 0,
    "num_steps": 0,
    "losses": {},
    "agreement": None,
}


@dataclass(frozen=True, eq=False)
class Ref:
    """The object ref of a call."""

    is_ready: Callable[[], bool]
    answer: Callable[[], Any]


class StubActor:
    """Its `run` ends after so many calls of `stop`, with an error or none; it answers so many calls of `status`."""

    def __init__(self, *, num_stops: float = 0, error: Exception | None = None, num_answers: float = math.inf) -> None:
        self._stops_left, self._error, self._answers_left = num_stops, error, num_answers
        self.has_ended, self.status_of_now = False, dict(STATUS)
        self.run = SimpleNamespace(remote=lambda: Ref(lambda: self._stops_left <= 0, self._end))
        self.status = SimpleNamespace(remote=lambda: Ref(lambda: self._answers_left > 0, self._answer))
        self.stop = SimpleNamespace(remote=self._stop)

    def _end(self) -> None:
        self.has_ended = True
        if self._error is not None:
            raise self._error

    def _answer(self) -> dict[str, Any]:
        self._answers_left -= 1
        return dict(self.status_of_now)

    def _stop(self) -> None:
        self._stops_left -= 1


class StubRay:
    """Makes learners of stub actors; the time passes in `wait` alone."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._actors = folder, list[StubActor]()
        self.now_s = 0.0

    def learner(self, actor: StubActor) -> _LearnerActor:
        self._actors.append(actor)
        return _LearnerActor(config.Settings(), self._folder)

    def remote(self, **options: Any) -> Callable[[type], Any]:
        return lambda cls: SimpleNamespace(remote=lambda settings, folder: self._actors.pop())

    def wait(self, refs: Sequence[Ref], *, timeout: float, num_returns: int = 1) -> tuple[list[Ref], list[Ref]]:
        self.now_s += timeout
        return [ref for ref in refs if ref.is_ready()], []

    def get(self, ref: Ref, *, timeout: float | None = None) -> Any:
        return ref.answer()


@pytest.fixture
def stub_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StubRay:
    ray, stub = pytest.importorskip("ray"), StubRay(tmp_path)
    for name in ("remote", "wait", "get"):
        monkeypatch.setattr(ray, name, getattr(stub, name))
    monkeypatch.setattr(distiller, "time", SimpleNamespace(monotonic=lambda: stub.now_s))
    return stub


def failing_actor() -> StubActor:
    from ray.exceptions import RayTaskError

    return StubActor(error=RayTaskError("run", "a traceback", ConfigError("no such loss")))


def test_the_last_warnings_of_a_learner_that_ends_are_in_the_distillers_log(
    stub_ray: StubRay, caplog: pytest.LogCaptureFixture
) -> None:
    learner = stub_ray.learner(StubActor())
    _watch([learner], threading.Event())
    assert f"{learner.target}: the newest snapshot is not published" in caplog.messages


def test_a_learner_lost_with_its_node_is_logged_as_waiting_once_and_holds_up_no_stop(
    stub_ray: StubRay, caplog: pytest.LogCaptureFixture
) -> None:
    learner, stop = stub_ray.learner(StubActor(num_stops=math.inf, num_answers=1)), threading.Event()
    waits = f"{learner.target}: waits for a Ray node"
    learner.log_status()
    stub_ray.now_s = LOST_S - 1
    learner.log_status()
    assert learner.is_placed
    assert learner.metrics == "figures"
    assert waits not in caplog.text
    for stub_ray.now_s in (LOST_S, 2 * LOST_S):
        learner.log_status()
    assert not learner.is_placed
    assert learner.metrics == ""
    assert caplog.text.count(waits) == 1
    stop.set()
    _watch([learner], stop)


def test_where_one_learner_fails_the_others_have_stopped_before_its_error_ends_the_distiller(
    stub_ray: StubRay,
) -> None:
    """A learner that is killed in a step accuses that step's records."""
    other = StubActor(num_stops=3)
    learners = [stub_ray.learner(failing_actor()), stub_ray.learner(other)]
    with pytest.raises(ConfigError, match="no such loss"):
        _watch(learners, threading.Event())
    assert other.has_ended


def test_a_learner_that_does_not_stop_delays_the_error_of_another_by_a_bounded_time(stub_ray: StubRay) -> None:
    learners = [stub_ray.learner(failing_actor()), stub_ray.learner(StubActor(num_stops=math.inf))]
    with pytest.raises(ConfigError, match="no such loss"):
        _watch(learners, threading.Event())
    assert STOP_S <= stub_ray.now_s < STOP_S + 5


def test_a_token_that_others_may_read_joins_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray 2.60 writes its token with 0644."""
    pytest.importorskip("ray")
    (token := tmp_path / "token").write_text("secret")
    token.chmod(0o644)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=f"chmod 600 {token}"):
        distiller.main(config.load(None, {}))
