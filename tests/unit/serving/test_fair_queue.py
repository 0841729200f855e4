"""The fair queue promises equal shares of time, order within a client, and that no client fills it for all."""

from pathlib import Path
from typing import cast

import pytest

from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.serving.fair_queue import MAX_IDLE_CLIENTS, FairQueue
from omnidraft.serving.queued_request import QueuedRequest

NO_ENGINE = cast(Engine, Path())
"""Requests only carry it."""


def request(client: str, priority: int = 0) -> QueuedRequest:
    return QueuedRequest(NO_ENGINE, [GenerationRequest(prompt="x")], client=client, priority=priority)


def serve(queue: FairQueue, num: int, costs_s: dict[str, float]) -> list[str]:
    """Payers in the order in which they are served."""
    clients = []
    for _ in range(num):
        served = queue.next()
        queue.charge(served.client, costs_s[served.client])
        clients.append(served.client)
    return clients


def test_one_request_is_not_starved_by_a_hundred_of_another_client():
    queue = FairQueue()
    for _ in range(100):
        queue.add(request("many"))
    assert serve(queue, 3, {"many": 1.0}) == ["many"] * 3
    queue.add(request("one"))
    assert "one" in serve(queue, 2, {"many": 1.0, "one": 1.0})


def test_clients_share_the_time_and_not_the_number_of_requests():
    """Texts of one take four times as long: it is served once for four of the other."""
    queue = FairQueue()
    for _ in range(100):
        queue.add(request("long"))
        queue.add(request("short"))
    clients = serve(queue, 100, {"long": 4.0, "short": 1.0})
    assert clients.count("short") == pytest.approx(80, abs=2)


def test_a_clients_own_requests_are_served_in_order():
    queue, requests = FairQueue(), [request("a") for _ in range(5)]
    for each in requests:
        queue.add(each)
    assert [queue.next() for _ in requests] == requests


def test_a_lower_priority_is_served_first_among_a_clients_own_requests_alone():
    queue = FairQueue()
    for priority in (2, 0, 9, -1, 0):
        queue.add(request("a", priority))
    urgent = [request("b", priority=-1000) for _ in range(5)]
    for each in urgent:
        queue.add(each)
    served = []
    for _ in range(10):
        served.append(queue.next())
        queue.charge(served[-1].client, 1.0)
    assert [each.priority for each in served if each.client == "a"] == [-1, 0, 0, 2, 9]
    assert [each.client for each in served] == ["a", "b"] * 5
    assert [each for each in served if each.client == "b"] == urgent


def test_nobody_saves_up_time_by_staying_away():
    queue = FairQueue()
    for _ in range(60):
        queue.add(request("busy"))
    serve(queue, 50, {"busy": 1.0})
    for _ in range(20):
        queue.add(request("late"))
    clients = serve(queue, 10, {"busy": 1.0, "late": 1.0})
    assert clients.count("late") == pytest.approx(5, abs=1)


@pytest.mark.parametrize("is_idle_between", [True, False])
def test_clients_who_never_come_again_are_forgotten(is_idle_between):
    queue = FairQueue()
    if not is_idle_between:
        for _ in range(2000):
            queue.add(request("busy"))
    for number in range(1000):
        queue.add(request(f"user {number}"))
        queue.charge(queue.next().client, 1.0)
    assert len(queue._served_s) <= (1 if is_idle_between else MAX_IDLE_CLIENTS + 2)
