"""A worker that has nothing to decode measures its passes again, where a start beside other load made them too dear."""

import time
from collections.abc import Callable

import pytest

from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.policy import cost_model
from omnidraft.decode.policy.cost_model import CostCurve, MeasuredCosts
from omnidraft.ports import Target
from omnidraft.serving import request_queue
from omnidraft.serving.queued_request import QueuedRequest
from omnidraft.serving.request_queue import RequestQueue
from tests.tiny_engine import PATIENCE_S


@pytest.fixture(autouse=True)
def _short_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "IDLE_S", 0.05)


@pytest.fixture
def engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """With costs that are 50 times what passes take, as if something else had taken the processors."""
    pass_s = cost_model._pass_s
    costs = MeasuredCosts(engine.decoder.target)
    with monkeypatch.context() as busy:
        busy.setattr(cost_model, "_pass_s", lambda session, rows: 50 * pass_s(session, rows))
        costs.passes("fast")
    monkeypatch.setattr(engine.decoder, "costs", costs)
    return engine


@pytest.fixture
def served(engine: Engine, requests: RequestQueue) -> Callable[[], int]:
    """Return a function that decodes a text and returns the number of its tokens."""

    def decode() -> int:
        request = GenerationRequest(prompt="How many clips", max_new_tokens=4, seed=1)
        steps = requests.submit(QueuedRequest(engine, [request], client="default")).steps()
        return sum(len(step.emitted) for _, step in steps)

    return decode


def costs_of(engine: Engine) -> MeasuredCosts:
    assert engine.decoder.costs is not None
    return engine.decoder.costs


def see_faster_passes(engine: Engine) -> CostCurve:
    """Return the curve of costs, which are too dear now."""
    curve = costs_of(engine).passes("fast")
    while curve.too_dear_at is None:
        curve.update(1, 0.5 * curve(1))
    return curve


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_idle_worker_measures_again_and_decodes_before_and_after(engine: Engine, served: Callable[[], int]) -> None:
    assert served() == 4
    curve = see_faster_passes(engine)
    wait_until(lambda: costs_of(engine).passes("fast") is not curve)
    assert served() == 4


def test_a_measurement_that_fails_ends_no_worker(
    engine: Engine, served: Callable[[], int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> Target:
        raise RuntimeError("no memory for the keys")

    assert served() == 4
    with monkeypatch.context() as broken:
        broken.setattr(engine.decoder.target, "open", refuse)
        see_faster_passes(engine)
        wait_until(lambda: "cannot measure the passes" in caplog.text)
    assert served() == 4
