"""The page stays fluent: no task of its main thread is long while eight recorded texts replay together."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from omnidraft.config import WorkerSettings
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.chromium_fixture import chromium as chromium
from tests.http_server import served
from tests.page_recordings import recording
from tests.tiny_engine import PATIENCE_S, tiny_worker

NUM_TEXTS, NUM_TOKENS = 8, 128
PASS_MS = 40.0
REPLAY_TIMEOUT_MS = 60_000
OBSERVE = """() => {
  window.longTasks = [];
  new PerformanceObserver((list) => list.getEntries().forEach((each) => window.longTasks.push(each.duration)))
    .observe({ type: "longtask" });
}"""

pytestmark = pytest.mark.long


@pytest.fixture
def url(tiny_models: tuple[Path, Path], omnidraft_home: Path) -> Iterator[str]:
    metrics = CountingMetrics()
    worker = tiny_worker(tiny_models, omnidraft_home, metrics)
    requests = RequestQueue(metrics, max_waiting=4)
    with served(application(requests, [ServedModel(worker.engine, "print")], WorkerSettings(), lambda: b"")) as made:
        yield made
    requests.close(PATIENCE_S)


def slowed(recorded: dict[str, Any]) -> dict[str, Any]:
    """The recording with passes as long as a real target's."""
    for lane in ("plain", "drafted"):
        for number, each in enumerate(recorded[lane]["passes"], 1):
            each["at_ms"] = number * PASS_MS
    return recorded


def test_no_task_is_longer_than_50_ms_while_eight_texts_replay(chromium: Browser, url: str) -> None:
    no_end = {str(number): -100 for number in range(3)}
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        asked = [f"How many clips did friend {number} buy?" for number in range(NUM_TEXTS)]
        texts = [slowed(recording(client, each, max_tokens=NUM_TOKENS, logit_bias=no_end)) for each in asked]
    content = json.dumps({"omnidraft_recordings": texts}).encode()
    page = chromium.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.goto(url)
    page.set_input_files("#file", {"name": "eight.json", "mimeType": "application/json", "buffer": content})
    expect(page.locator(".run .controls:visible")).to_have_count(NUM_TEXTS, timeout=REPLAY_TIMEOUT_MS)
    page.wait_for_timeout(500)
    page.evaluate(OBSERVE)
    page.click("#replay-all")
    expect(page.locator(".run.is-over")).to_have_count(NUM_TEXTS, timeout=REPLAY_TIMEOUT_MS)
    assert page.locator(".run .pass.later").count() == 0
    assert page.evaluate("window.longTasks") == []
    page.close()
