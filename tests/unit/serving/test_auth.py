"""API keys: a client without one learns nothing, a client with one is its tenant, and no key is ever shown."""

import json
import logging
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from omnidraft import config
from omnidraft.config import ApiKey, WorkerSettings
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.errors import ConfigError
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.queued_request import QueuedRequest
from omnidraft.serving.request_queue import RequestQueue

KEY, OTHER = "sk-of-acme-0123456789", "sk-of-anybody-0123456789"
BODY = {"prompt": "clips", "max_tokens": 2, "user": "someone"}


class Watched(RequestQueue):
    """Keeps what was submitted."""

    def submit(self, request: QueuedRequest) -> QueuedRequest:
        self.last = request
        return super().submit(request)


@pytest.fixture
def watched(metrics) -> Iterator[Watched]:
    made = Watched(metrics, max_waiting=2)
    yield made
    made.close(20.0)


@pytest.fixture
def client(watched: Watched, engine: Engine) -> Iterator[TestClient]:
    keys = (ApiKey(key=KEY, tenant="acme"), ApiKey(key=OTHER))
    app = application(watched, [ServedModel(engine, "print")], WorkerSettings(api_keys=keys), lambda: b"")
    with TestClient(app) as made:
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer(KEY[:-1]),
        bearer(KEY + "0"),
        bearer(KEY.upper()),
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer \u00e9".encode("latin-1")},
    ],
    ids=["none", "empty", "too short", "too long", "upper case", "no scheme", "another scheme", "not ASCII"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/nothing", "/nothing"])
def test_without_a_key_there_is_nothing_but_a_401(client: TestClient, path: str, headers: dict) -> None:
    response = client.post(path, json=BODY, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_probes_scrapers_and_readers_of_the_document_need_none(client: TestClient) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
        assert client.get(path).status_code == 200


def test_a_body_without_a_key_is_never_read(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        raise AssertionError("read")
        yield b""

    assert client.post("/v1/completions", content=chunks()).status_code == 401


def test_a_key_says_whose_the_request_is_whatever_the_request_says(client: TestClient, watched: Watched) -> None:
    clients = []
    for key in (KEY, OTHER):
        assert client.post("/v1/completions", json=BODY, headers=bearer(key)).status_code == 200
        generation: GenerationRequest = watched.last.texts[0].request
        clients.append((generation.tenant, watched.last.client))
    assert clients == [("acme", "key 0"), ("someone", "key 1")]
    assert client.get("/v1/models", headers={"authorization": f"bearer {KEY}"}).status_code == 200


def test_keys_come_from_the_environment_and_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    value = json.dumps([{"key": KEY, "tenant": "acme"}, {"key": OTHER}])
    settings = config.load(None, {"OMNIDRAFT_WORKER__API_KEYS": value})
    assert [each.key.get_secret_value() for each in settings.worker.api_keys] == [KEY, OTHER]
    with caplog.at_level(logging.INFO):
        logging.getLogger("test").info("%s %r", settings, settings)
    for shown in (caplog.text, settings.model_dump_json(), repr(settings.worker)):
        assert KEY not in shown
        assert "acme" in shown


@pytest.mark.parametrize(
    ("keys", "message_part"),
    [
        ([{"key": "sk-too-short"}], "worker.api_keys.0.key: a key has 16 printable ASCII letters or more"),
        ([{"key": "sk-with space-0123456789"}], "worker.api_keys.0.key"),
        ([{"key": KEY}, {"key": KEY}], "two of worker.api_keys are the same key"),
        ([KEY], "worker.api_keys.0"),
        (KEY, "worker.api_keys"),
        ([{"kee": KEY}], "worker.api_keys.0"),
        ([{"key": KEY, "tenant": ""}], "worker.api_keys.0.tenant"),
    ],
)
def test_a_bad_key_is_refused_without_being_shown(keys: object, message_part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load(None, {"OMNIDRAFT_WORKER__API_KEYS": json.dumps(keys)})
    assert message_part in str(refused.value)
    for secret in (KEY, "sk-too-short", "sk-with"):
        assert secret not in str(refused.value)
