"""Two real targets of different families served by one real drafter in one process, each bit for bit as without it."""

from dataclasses import replace
from pathlib import Path

import pytest

from omnidraft import assembly, config
from omnidraft.decode.generation import GenerationRequest
from omnidraft.serving.queued_request import QueuedRequest
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.tiny_engine import steps_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TARGETS = ("qwen2.5-coder-0.5b", "gemma3-270m")
QUESTION = GenerationRequest(prompt="def add(first, second):", max_new_tokens=16, seed=1, is_stored=False)


def test_two_real_targets_share_a_drafter_and_give_the_texts_of_plain_decoding(tmp_path: Path) -> None:
    settings = config.load(
        None,
        {},
        models={"target": TARGETS[0], "more_targets": TARGETS[1:], "drafter": "smollm2-135m"},
        log={"url": f"sqlite:///{tmp_path}/log.db"},
        registry={"url": f"directory:///{tmp_path}/registry"},
        recorder={"enabled": False},
        decode={"mode": "reproducible", "policy": "fixed"},
    )
    worker = assembly.worker(settings, CountingMetrics())
    engines = [each.engine for each in worker.served]
    one, other = (each.slot.current.proposer.sources[-1].model for each in engines)
    assert one is other
    requests = RequestQueue(CountingMetrics(), max_waiting=4)
    asked = [(engine, replace(QUESTION, num_draft_tokens=num)) for num in (0, None) for engine in engines]
    tickets = [requests.submit(QueuedRequest(engine, [question])) for engine, question in asked]
    texts = ["".join(step.text for _, step in steps_of(ticket)) for ticket in tickets]
    requests.close(60.0)
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]
    for plain, drafted in zip(tickets[:2], tickets[2:], strict=True):
        assert plain.stats.num_passes == plain.stats.num_tokens
        print(f"{drafted.engine.pair.target}: {drafted.stats.tokens_per_pass:.2f} tokens per pass")
        assert drafted.stats.num_scored > 0
