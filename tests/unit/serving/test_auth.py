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
from omnidraft.decode.sampling.grammar import Grammars
from omnidraft.decode.sampling.grammar_trial import GrammarTrial
from omnidraft.errors import ConfigError
from omnidraft.memory.memory_file import Owner
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.auth import ApiClient, cache_scope
from omnidraft.serving.queued_request import QueuedRequest
from omnidraft.serving.request_queue import RequestQueue

KEY, OTHER, METRICS_KEY = "sk-of-acme-0123456789", "sk-of-anybody-0123456789", "sk-of-prometheus-0123456789"
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
def test_without_a_key_there_is_nothing_but_a_401(client: TestClient, headers: dict) -> None:
    for path in ("/v1/completions", "/v1/models", "/v1/nothing", "/nothing"):
        response = client.post(path, json=BODY, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_probes_scrapers_and_readers_of_the_document_need_none(client: TestClient) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
        assert client.get(path).status_code == 200


@pytest.mark.parametrize("keys", [(), (ApiKey(key=KEY, tenant="acme"),)], ids=["no API keys", "API keys"])
def test_metrics_are_for_holders_of_their_key_alone(watched: Watched, engine: Engine, keys: tuple[ApiKey, ...]) -> None:
    """They tell how much all tenants send together, so no tenant's key opens them, and theirs opens nothing else."""
    settings = WorkerSettings(api_keys=keys, metrics_key=METRICS_KEY)
    app = application(watched, [ServedModel(engine, "print")], settings, lambda: b"figures of all")
    with TestClient(app) as scraped:
        for headers in ({}, bearer(KEY), bearer(METRICS_KEY[:-1]), {"Authorization": METRICS_KEY}):
            refused = scraped.get("/metrics", headers=headers)
            assert (refused.status_code, "figures" in refused.text) == (401, False)
        assert scraped.get("/metrics", headers=bearer(METRICS_KEY)).text == "figures of all"
        assert scraped.get("/healthz").status_code == 200
        assert scraped.get("/v1/models", headers=bearer(METRICS_KEY)).status_code == (401 if keys else 200)
        assert scraped.get("/openapi.json").json()["paths"]["/metrics"]["get"]["security"] == [{"metrics_key": []}]


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


def test_a_key_without_a_tenant_cannot_take_the_name_that_another_key_has(client: TestClient, watched: Watched) -> None:
    """Nor one that reads like it."""
    for user in ("acme", "ACME", " acme ", "ac\u200bme", "\uff41cme"):
        refused = client.post("/v1/completions", json=BODY | {"user": user}, headers=bearer(OTHER))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_taken")
        assert not hasattr(watched, "last")
    assert client.post("/v1/completions", json=BODY | {"user": user}, headers=bearer(KEY)).status_code == 200
    assert watched.last.texts[0].request.tenant == "acme"


def test_no_request_has_the_name_of_a_groups_keys(client: TestClient, watched: Watched) -> None:
    named = BODY | {"user": Owner("group", "g").key_name}
    refused = client.post("/v1/completions", json=named, headers=bearer(OTHER))
    assert (refused.status_code, "user: names that begin with" in refused.json()["error"]["message"]) == (400, True)
    assert not hasattr(watched, "last")
    assert client.post("/v1/completions", json=named, headers=bearer(KEY)).status_code == 200
    assert watched.last.texts[0].request.tenant == "acme"


def test_no_two_of_tenants_keys_addresses_and_salts_share_a_cache() -> None:
    """Whoever shares one learns by speed how the other's prompts begin."""
    clients = [
        None,
        *(ApiClient(name, tenant) for name in ("key 0", "key 1") for tenant in (None, "a", "a/b", "key 0")),
    ]
    scopes: dict[str, set] = {}
    for each in clients:
        for address in ("key 0", "a", "a/b"):
            for salt in (None, "", "b/", "/"):
                owner = ("address", address) if each is None else (each.tenant or f"key:{each.name}", None)
                scopes.setdefault(cache_scope(each, address, salt), set()).add((owner, salt))
    assert all(len(owners) == 1 for owners in scopes.values())


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
        ([{"key": KEY, "tenant": "memory group g"}], "worker.api_keys.0.tenant: names that begin with"),
    ],
)
def test_a_bad_key_is_refused_without_being_shown(keys: object, message_part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load(None, {"OMNIDRAFT_WORKER__API_KEYS": json.dumps(keys)})
    assert message_part in str(refused.value)
    for secret in (KEY, "sk-too-short", "sk-with"):
        assert secret not in str(refused.value)


@pytest.mark.parametrize(
    ("section", "message_part"),
    [
        ({"metrics_key": KEY, "api_keys": [{"key": KEY}]}, "worker.metrics_key is one of worker.api_keys"),
        (
            {"tenant": "acme", "api_keys": [{"key": KEY, "tenant": "acme"}, {"key": OTHER}]},
            "set worker.tenant to a name",
        ),
        ({"tenant": "memory group g"}, "worker.tenant: names that begin with 'memory group '"),
        ({"metrics_key": "short"}, "worker.metrics_key: a key has 16 printable ASCII letters"),
    ],
)
def test_settings_that_would_mix_tenants_are_refused(section: dict, message_part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load(None, {}, worker=section)
    assert message_part in str(refused.value)
    config.load(None, {}, worker={"tenant": "acme", "api_keys": [{"key": KEY, "tenant": "acme"}]})


class CountingTrial(GrammarTrial):
    """Counts the grammars that are compiled, and lets each of them pass."""

    num = 0

    def check(self, kind: str, text: str) -> None:
        self.num += 1


@pytest.mark.parametrize(("fields", "is_refused"), [({}, True), ({"cache_salt": "a"}, False)], ids=["refused", "salt"])
def test_no_tenant_finds_a_grammar_that_another_one_used(
    client: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch, fields: dict, *, is_refused: bool
) -> None:
    """Whoever finds one learns by speed which schemas, and tools, the others use."""
    vocabulary = engine.pair.target_tokenizer.vocabulary
    trial = CountingTrial(vocabulary)
    monkeypatch.setattr(engine.decoder, "grammars", Grammars(vocabulary, trial))

    def num_compiled(key: str, regex: str, **more: str) -> int:
        before = trial.num
        body = BODY | fields | more | {"structured_outputs": {"regex": regex}}
        assert client.post("/v1/completions", json=body, headers=bearer(key)).status_code in (200, 400)
        return trial.num - before

    secret = "(" if is_refused else "[ab]+"
    assert [num_compiled(KEY, secret) for _ in range(2)] == [1, 0]
    assert [num_compiled(OTHER, secret) for _ in range(2)] == [1, 0]
    assert num_compiled(KEY, secret, cache_salt="b") == 1
    assert sum(num_compiled(OTHER, f"[ab]{{{number}}}") for number in range(40)) == 40
    assert num_compiled(KEY, secret) == 0
