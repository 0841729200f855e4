"""Tokens for Kafka's clients: one is used until its end is near, and the one before while there is no other."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kafka.errors import KafkaConnectionError
from pydantic import SecretStr

from omnidraft.bus.kafka_tokens import OAuthTokens
from omnidraft.config import KafkaSettings
from tests.kafka_logins import TokenEndpoint

SECRET = "correct-horse"
LIFE_S = 100.0


class Clock:
    now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr("omnidraft.bus.kafka_tokens.time", made := Clock())
    return made


@pytest.fixture
def endpoint() -> Iterator[TokenEndpoint]:
    with closing(TokenEndpoint({"OMNIDRAFT_KAFKA_WORKER_PASSWORD": SECRET})) as made:
        made.life_s = LIFE_S
        yield made


def tokens(url: str, secret: str = SECRET, **fields: object) -> OAuthTokens:
    login = {"username": "omnidraft-worker", "password": SecretStr(secret), "token_scope": "kafka"}
    named = {"security": "sasl_ssl", "mechanism": "OAUTHBEARER", "token_url": url}
    return OAuthTokens(KafkaSettings.model_validate({**login, **named, **fields}))


def test_a_token_is_used_until_its_end_is_near(endpoint: TokenEndpoint, clock: Clock) -> None:
    source = tokens(endpoint.url, token_extensions={"logicalCluster": "lkc-1"})
    first = source.token()
    clock.now_s += 0.7 * LIFE_S
    assert source.token() == first
    clock.now_s += 0.15 * LIFE_S
    assert source.token() == endpoint.last_token != first
    assert endpoint.issued.total() == 2
    assert source.extensions() == {"logicalCluster": "lkc-1"}


def test_while_there_is_no_other_the_one_before_is_used_to_its_end(endpoint: TokenEndpoint, clock: Clock) -> None:
    source = tokens(endpoint.url)
    first = source.token()
    endpoint.is_down.set()
    clock.now_s += 0.85 * LIFE_S
    assert source.token() == first
    clock.now_s += 0.2 * LIFE_S
    with pytest.raises(KafkaConnectionError, match=f"no token from {endpoint.url}: it answers 503"):
        source.token()
    endpoint.is_down.clear()
    assert source.token() == endpoint.last_token != first


def test_a_token_in_a_file_is_that_of_the_moment(tmp_path: Path) -> None:
    (file := tmp_path / "a token").write_text("one\n")
    source = tokens(file.as_uri())
    assert source.token() == "one"
    file.write_text("two")
    assert source.token() == "two"
    for broken in ("", None):
        file.write_text("") if broken == "" else file.unlink()
        with pytest.raises(KafkaConnectionError, match="no token from"):
            source.token()


def test_a_refusal_shows_no_secret(endpoint: TokenEndpoint) -> None:
    for url, secret in ((endpoint.url, "wrong-horse"), ("http://127.0.0.1:1/token", SECRET)):
        with pytest.raises(KafkaConnectionError) as refused:
            tokens(url, secret).token()
        assert secret not in str(refused.value)


def test_an_answer_without_a_token_is_none(endpoint: TokenEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in ({}, [], {"access_token": ""}, {"access_token": 5}, {"access_token": "a", "expires_in": "soon"}):
        monkeypatch.setattr(endpoint, "token", lambda user, answer=answer: answer)
        with pytest.raises(KafkaConnectionError, match="there is none in it"):
            tokens(endpoint.url).token()
