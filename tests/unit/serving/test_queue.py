"""What the queue promises: order, a bound, one text at a time, and a thread that outlives every failure."""

import threading
import time

import pytest

from omnidraft.decode.engine import Engine, Question
from omnidraft.errors import ContractError, RequestError
from omnidraft.serving.queue import Abandoned, QueueFull, RequestQueue, Stopping
from omnidraft.serving.ticket import Ticket
from omnidraft.telemetry.metrics import CountingMetrics
from tests.tiny_engine import PATIENCE_S, Failing, Gated, snapshot

QUESTION = Question(prompt="How many clips", max_new_tokens=4, seed=1)


def gated(engine: Engine) -> Gated:
    proposer = Gated()
    engine.slot.swap(snapshot(1, proposer))
    return proposer


def ticket(engine: Engine, payer: str = "default") -> Ticket:
    return Ticket(engine, [QUESTION], payer=payer)


def num_tokens(ticket: Ticket) -> int:
    return sum(len(step.emitted) for _, step in ticket.pieces())


def wait_for(metrics: CountingMetrics, status: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not metrics.value("omnidraft_requests_total", status=status):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_full_queue_refuses_and_takes_again_when_there_is_room(engine: Engine, requests: RequestQueue) -> None:
    proposer = gated(engine)
    running = requests.submit(ticket(engine))
    assert proposer.is_reached.wait(PATIENCE_S)
    waiting = [requests.submit(ticket(engine)), requests.submit(ticket(engine))]
    with pytest.raises(QueueFull, match="2 requests are waiting already; try again later"):
        requests.submit(ticket(engine))
    proposer.gate.set()
    assert [num_tokens(each) for each in (running, *waiting)] == [4, 4, 4]
    assert num_tokens(requests.submit(ticket(engine))) == 4


def test_a_client_that_goes_away_frees_the_queue(
    engine: Engine, requests: RequestQueue, metrics: CountingMetrics
) -> None:
    proposer = gated(engine)
    running, waiting = requests.submit(ticket(engine)), None
    assert proposer.is_reached.wait(PATIENCE_S)
    waiting, last = requests.submit(ticket(engine)), requests.submit(ticket(engine))
    requests.give_up(running)
    requests.give_up(waiting)
    proposer.gate.set()
    assert num_tokens(last) == 4
    assert running.figures.num_passes == 1
    assert waiting.figures.num_passes == 0
    wait_for(metrics, "ok")
    assert metrics.value("omnidraft_requests_total", status="abandoned") == 2
    for each in (running, waiting):
        with pytest.raises(Abandoned, match="went away"):
            list(each.pieces())


@pytest.mark.parametrize(
    "error",
    [ContractError("broken"), RuntimeError("out of memory"), TypeError("a bug")],
    ids=["ours", "torch's", "a bug"],
)
def test_the_thread_survives_what_decoding_raises(
    engine: Engine, requests: RequestQueue, metrics: CountingMetrics, error: Exception
) -> None:
    base = engine.slot.current.proposer
    engine.slot.swap(snapshot(1, Failing(error, num_good=2)))
    asked = requests.submit(ticket(engine))
    seen = []
    with pytest.raises(type(error), match=str(error)):
        seen.extend(asked.pieces())
    with pytest.raises(RequestError, match="prompt is empty"):
        list(requests.submit(Ticket(engine, [Question(prompt="")])).pieces())
    engine.slot.swap(snapshot(2, base))
    assert num_tokens(requests.submit(ticket(engine))) == 4
    wait_for(metrics, "ok")
    assert metrics.value("omnidraft_requests_total", status=type(error).__name__) == 1
    assert metrics.value("omnidraft_requests_total", status="RequestError") == 1
    assert len(metrics.observed("omnidraft_time_to_first_token_seconds", target=engine.pair.target)) == 2


def test_closing_finishes_what_was_accepted_and_refuses_the_rest(engine: Engine, metrics: CountingMetrics) -> None:
    proposer = gated(engine)
    requests = RequestQueue(metrics, max_waiting=4)
    tickets = [requests.submit(ticket(engine)) for _ in range(3)]
    assert proposer.is_reached.wait(PATIENCE_S)
    closing = threading.Thread(target=requests.close, args=(PATIENCE_S,))
    closing.start()
    deadline = time.monotonic() + PATIENCE_S
    with pytest.raises(Stopping):  # noqa: PT012 -- the one line that may raise stands in a loop
        while time.monotonic() < deadline:
            tickets.append(requests.submit(ticket(engine)))
            time.sleep(0.001)
    proposer.gate.set()
    closing.join(PATIENCE_S)
    assert [num_tokens(each) for each in tickets] == [4] * len(tickets)
