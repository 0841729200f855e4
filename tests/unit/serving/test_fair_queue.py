"""What the fair line promises: time in equal shares, order within a payer, and no client that fills it for all."""

from pathlib import Path
from typing import cast

import pytest

from omnidraft.decode.engine import Engine, GenerationRequest
from omnidraft.serving.fair_queue import MAX_IDLE_CLIENTS, FairQueue
from omnidraft.serving.queued_request import QueuedRequest

NO_ENGINE = cast(Engine, Path())
"""Tickets only carry it."""


def ticket(payer: str) -> QueuedRequest:
    return QueuedRequest(NO_ENGINE, [GenerationRequest(prompt="x")], client=payer)


def serve(line: FairQueue, num: int, costs_s: dict[str, float]) -> list[str]:
    """Payers in the order in which they are served."""
    payers = []
    for _ in range(num):
        served = line.next()
        line.charge(served.client, costs_s[served.client])
        payers.append(served.client)
    return payers


def test_one_request_is_not_starved_by_a_hundred_of_another_client():
    line = FairQueue()
    for _ in range(100):
        line.add(ticket("many"))
    assert serve(line, 3, {"many": 1.0}) == ["many"] * 3
    line.add(ticket("one"))
    assert "one" in serve(line, 2, {"many": 1.0, "one": 1.0})


def test_payers_share_the_time_and_not_the_number_of_requests():
    """Texts of one take four times as long: it is served once for four of the other."""
    line = FairQueue()
    for _ in range(100):
        line.add(ticket("long"))
        line.add(ticket("short"))
    payers = serve(line, 100, {"long": 4.0, "short": 1.0})
    assert payers.count("short") == pytest.approx(80, abs=2)


def test_a_payers_own_requests_are_served_in_order():
    line, tickets = FairQueue(), [ticket("a") for _ in range(5)]
    for each in tickets:
        line.add(each)
    assert [line.next() for _ in tickets] == tickets


def test_nobody_saves_up_time_by_staying_away():
    line = FairQueue()
    for _ in range(60):
        line.add(ticket("busy"))
    serve(line, 50, {"busy": 1.0})
    for _ in range(20):
        line.add(ticket("late"))
    payers = serve(line, 10, {"busy": 1.0, "late": 1.0})
    assert payers.count("late") == pytest.approx(5, abs=1)


def test_a_full_line_makes_room_at_the_cost_of_whoever_has_most():
    line, tickets = FairQueue(), [ticket("many") for _ in range(4)]
    for each in tickets:
        line.add(each)
    assert line.evict_for("many") is None
    assert line.evict_for("new") is tickets[-1]
    line.add(ticket("new"))
    assert line.evict_for("new") is tickets[-2]
    line.add(ticket("new"))
    assert line.evict_for("new") is None  # two each
    assert len(line) == 4


def test_who_leaves_is_not_served():
    line, gone, stays = FairQueue(), ticket("a"), ticket("a")
    line.add(gone)
    line.add(stays)
    assert line.remove(gone)
    assert not line.remove(gone)
    assert line.next() is stays
    assert len(line) == 0


@pytest.mark.parametrize("is_idle_between", [True, False])
def test_payers_who_never_come_again_are_forgotten(is_idle_between):
    line = FairQueue()
    if not is_idle_between:
        for _ in range(2000):
            line.add(ticket("busy"))
    for number in range(1000):
        line.add(ticket(f"user {number}"))
        line.charge(line.next().client, 1.0)
    assert len(line._served_s) <= (1 if is_idle_between else MAX_IDLE_CLIENTS + 2)
