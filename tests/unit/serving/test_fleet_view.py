"""The fleet is shown to holders of the operator's key alone, and to nobody where there is none."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import ValidationError

from omnidraft.config import ApiKey, WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.page.files import FLEET_PATH
from omnidraft.serving.page.fleet_stream import Fleet, FleetOrder
from omnidraft.serving.request_queue import RequestQueue

KEY, OPERATOR_KEY = "sk-of-a-tenant-0123456789", "sk-of-the-operator-0123456789"
FLEET = {"targets": [], "problems": ["log: refused"]}
Make = Callable[..., FastAPI]


@dataclass
class ReadOnce:
    """A fleet; the queue closes when it is read, so that its stream ends."""

    requests: RequestQueue
    orders: list[FleetOrder] = field(default_factory=list)

    def read(self) -> dict[str, Any]:
        self.requests.stop_accepting()
        return FLEET

    def obey(self, order: FleetOrder) -> None:
        self.orders.append(order)


@pytest.fixture
def make(requests: RequestQueue, engine: Engine) -> Make:
    """An application over a fleet."""

    def made(fleet: Fleet | None = None, **settings: Any) -> FastAPI:
        served = [ServedModel(engine, "print")]
        return application(requests, served, WorkerSettings(**settings), lambda: b"", fleet=fleet or ReadOnce(requests))

    return made


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("keys", [(), (ApiKey(key=KEY),)], ids=["no API keys", "API keys"])
def test_the_operators_key_opens_the_fleet_and_no_other_does(make: Make, keys: tuple[ApiKey, ...]) -> None:
    with TestClient(make(operator_key=OPERATOR_KEY, api_keys=keys)) as client:
        for headers in ({}, bearer(KEY), bearer(OPERATOR_KEY[:-1]), {"Authorization": OPERATOR_KEY}):
            refused = client.get(FLEET_PATH, headers=headers)
            assert (refused.status_code, "problems" in refused.text) == (401, False)
        assert client.get("/v1/models", headers=bearer(OPERATOR_KEY)).status_code == (401 if keys else 200)
        shown = client.get(FLEET_PATH, headers=bearer(OPERATOR_KEY))
        assert shown.text == f"event: fleet\ndata: {json.dumps(FLEET)}\n\n"


@pytest.mark.parametrize("settings", [{}, {"operator_key": OPERATOR_KEY, "page": False}], ids=["no key", "no page"])
def test_without_a_key_or_a_page_there_is_no_fleet(make: Make, settings: dict[str, Any]) -> None:
    with TestClient(make(**settings)) as client:
        assert client.get(FLEET_PATH, headers=bearer(OPERATOR_KEY)).status_code == 404


@pytest.mark.parametrize("others", [{"api_keys": (ApiKey(key=OPERATOR_KEY),)}, {"metrics_key": OPERATOR_KEY}])
def test_the_operators_key_is_nobody_elses(others: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="whose holders are no operators"):
        WorkerSettings(operator_key=OPERATOR_KEY, **others)


def test_orders_are_taken_from_the_operator_alone_and_only_whole(make: Make, requests: RequestQueue) -> None:
    fleet = ReadOnce(requests)
    promote = {"kind": "promote", "target": "tiny", "version": 3}
    with TestClient(make(fleet, operator_key=OPERATOR_KEY)) as client:
        assert client.post(FLEET_PATH, json=promote).status_code == 401
        for wrong in (promote | {"version": None}, promote | {"kind": "pause"}, promote | {"kind": "erase"}):
            assert client.post(FLEET_PATH, json=wrong, headers=bearer(OPERATOR_KEY)).status_code == 400
        assert fleet.orders == []
        assert client.post(FLEET_PATH, json=promote, headers=bearer(OPERATOR_KEY)).json() == FLEET
    assert fleet.orders == [FleetOrder(kind="promote", target="tiny", version=3)]
