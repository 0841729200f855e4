"""A replica without Ray around it: it answers as the worker's application does, and says when it has to be replaced."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from omnidraft import assembly, config
from omnidraft.hosts.asgi_bridge import HttpCall, ResponseStart
from omnidraft.hosts.ray_worker import DecodeReplica, ReplicaUnhealthy
from omnidraft.traces import codec
from tests.tiny_engine import tiny_settings

BODY = {"prompt": "How many", "max_tokens": 6, "seed": 1, "temperature": 1}
NUM_STREAMS = 3


@pytest.fixture
def settings(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> config.Settings:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    return tiny_settings(
        tiny_models,
        log={"url": f"sqlite:///{tmp_path}/log.db"},
        registry={"url": f"directory:///{tmp_path}/registry"},
        worker={"poll_s": 0.05},
    )


async def ask(replica: DecodeReplica, **more: Any) -> tuple[ResponseStart, bytes]:
    body = json.dumps(BODY | more).encode()
    call = HttpCall("POST", "/v1/completions", ((b"content-type", b"application/json"),), body)
    head, *pieces = [frame async for frame in replica.respond(call)]
    assert isinstance(head, ResponseStart)
    return head, b"".join(piece for piece in pieces if isinstance(piece, bytes))


def test_a_replica_answers_records_and_drains(settings: config.Settings) -> None:
    async def live() -> tuple[Any, list[Any], Any, bytes]:
        replica = DecodeReplica(settings)
        replica.check_health()
        whole = await ask(replica)
        streams = await asyncio.gather(*(ask(replica, stream=True) for _ in range(NUM_STREAMS)))
        facts, (_, scrape) = replica.facts(), replica.metrics_text()
        await asyncio.to_thread(replica.__del__)
        with pytest.raises(ReplicaUnhealthy):
            replica.check_health()
        return whole, list(streams), facts, scrape

    (head, body), streams, facts, scrape = asyncio.run(live())
    text = json.loads(body)["choices"][0]["text"]
    assert head.status == 200
    assert text
    for _, events in streams:
        told = [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: {")]
        assert "".join(each["choices"][0]["text"] for each in told) == text
    assert (facts.target, facts.snapshot_version, facts.snapshot_id) == (settings.models.target, None, "base")
    assert f'omnidraft_requests_total{{status="ok",target="{facts.target}"}} {1 + NUM_STREAMS}.0' in scrape.decode()
    reader = assembly.log_reader(settings, settings.log.traces_topic)
    records = [codec.decode(each.value, each.headers) for each in reader.poll(10, 1.0).messages]
    assert {record.worker for record in records} == {facts.worker}
    assert len(records) == 1 + NUM_STREAMS


def test_a_request_that_is_given_up_is_abandoned(settings: config.Settings) -> None:
    """Serve closes the generator of a client that went away; the next request is not kept waiting by a long text."""

    async def live() -> bytes:
        replica = DecodeReplica(settings)
        body = json.dumps(BODY | {"max_tokens": 900, "stream": True}).encode()
        frames = replica.respond(HttpCall("POST", "/v1/completions", ((b"content-type", b"application/json"),), body))
        await anext(frames)
        await frames.aclose()
        await asyncio.wait_for(ask(replica), 20)
        scrape = replica.metrics_text()[1]
        await asyncio.to_thread(replica.__del__)
        return scrape

    assert 'omnidraft_requests_total{status="abandoned"' in asyncio.run(live()).decode()
