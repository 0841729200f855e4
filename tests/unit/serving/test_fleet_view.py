"""The fleet is shown to holders of the operator's key alone, and to nobody where there is none."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import ValidationError

from omnidraft.config import ApiKey, WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.page.files import FLEET_PATH
from omnidraft.serving.request_queue import RequestQueue

KEY, OPERATOR_KEY = "sk-of-a-tenant-0123456789", "sk-of-the-operator-0123456789"
FLEET = {"targets": [], "problems": ["log: refused"]}
Make = Callable[..., FastAPI]


@pytest.fixture
def make(requests: RequestQueue, engine: Engine) -> Make:
    """An application whose queue closes when the fleet has been read once, so that its stream ends."""

    def read() -> dict[str, Any]:
        requests.stop_accepting()
        return FLEET

    def made(**settings: Any) -> FastAPI:
        served = [ServedModel(engine, "print")]
        return application(requests, served, WorkerSettings(**settings), lambda: b"", read_fleet=read)

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
