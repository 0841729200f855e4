"""The page in a real browser: it asks, compares, replays, and shows every text as text."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from omnidraft.config import ApiKey, WorkerSettings
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.http_server import served
from tests.page_recordings import recording
from tests.tiny_engine import PATIENCE_S, tiny_worker

PROGRAM = "chromium"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    program = shutil.which(PROGRAM)
    if program is None:
        _skip("no chromium here (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


def _skip(why: str) -> None:
    """Never returns."""
    if os.environ.get("OMNIDRAFT_REQUIRE_CHROMIUM") == "1":
        pytest.fail(f"OMNIDRAFT_REQUIRE_CHROMIUM=1, but {why}")
    pytest.skip(why)


KEY = "sk-for-the-browser-0123"
QUESTION = "How many clips did Natalia sell?"
MARKUP = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def url(tiny_models: tuple[Path, Path], omnidraft_home: Path) -> Iterator[str]:
    """A worker whose API needs a key."""
    metrics = CountingMetrics()
    worker = tiny_worker(tiny_models, omnidraft_home, metrics)
    requests = RequestQueue(metrics, max_waiting=4)
    settings = WorkerSettings(api_keys=(ApiKey(key=KEY),))
    models = [ServedModel(worker.engine, "print")]
    with served(application(requests, models, settings, lambda: b"")) as made:
        yield made
        requests.stop_accepting()
    requests.close(PATIENCE_S)


@pytest.fixture(scope="module")
def recorded(url: str) -> dict[str, Any]:
    """One question with both its lanes."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S) as client:
        return recording(client, QUESTION)


@pytest.fixture
def page(chromium: Browser, url: str) -> Iterator[Page]:
    """Without a key yet, in a browser that notes what it should not see: errors, and requests to other hosts."""
    made = chromium.new_page(reduced_motion="reduce")
    made.set_default_timeout(PATIENCE_S * 1000)
    errors: list[str] = []
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
    made.on("request", lambda request: None if request.url.startswith(url) else errors.append(request.url))
    made.goto(url)
    yield made
    assert errors == []
    made.close()


def open_recordings(page: Page, *recordings: dict[str, Any]) -> None:
    content = json.dumps({"omnidraft_recordings": recordings}).encode()
    page.set_input_files("#file", {"name": "recordings.json", "mimeType": "application/json", "buffer": content})
    expect(page.locator(".run .controls:visible")).to_have_count(len(recordings))


def test_a_visitor_gives_a_key_asks_and_sees_both_lanes_agree(page: Page, recorded: dict[str, Any]) -> None:
    expect(page.locator("#key-form")).to_be_visible()
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.locator("#model option")).to_have_count(1)
    page.fill("#seed", "5")
    page.fill("#max-tokens", "24")
    page.fill("#question", QUESTION)
    page.press("#question", "Enter")
    expect(page.locator(".verdict.is-good")).to_contain_text("identical text, bit for bit")
    plain, drafted = (page.locator(f".{lane} .text .token").all_text_contents() for lane in ("plain", "drafted"))
    told = [token["text"] for each in recorded["plain"]["passes"] for token in each["tokens"]]
    assert plain == drafted == told
    assert page.locator(".drafted .pass").count() == len(recorded["drafted"]["passes"])


def test_a_wrong_key_is_asked_for_again(page: Page) -> None:
    page.fill("#key", KEY[:-1])
    page.press("#key", "Enter")
    expect(page.locator("#status")).to_contain_text("no such API key")
    expect(page.locator("#key-form")).to_be_visible()


def test_a_difference_is_told_and_marked(page: Page, recorded: dict[str, Any]) -> None:
    changed = copy.deepcopy(recorded)
    changed["drafted"]["end"]["ids"][3] += 1
    open_recordings(page, changed)
    expect(page.locator(".verdict.is-bad")).to_contain_text("NOT identical: the texts differ from token 4 on")
    assert page.locator(".drafted .token.differs").count() == 1


def test_markup_in_a_text_is_shown_and_never_run(page: Page, recorded: dict[str, Any]) -> None:
    hostile = copy.deepcopy(recorded)
    hostile["asked"] |= {"question": MARKUP, "target": MARKUP, "drafter": MARKUP}
    for lane in ("plain", "drafted"):
        for each in hostile[lane]["passes"]:
            for token in each["tokens"]:
                token |= {"text": MARKUP, "spelled": MARKUP}
            for node in each["nodes"]:
                node["spelled"] = MARKUP
    open_recordings(page, hostile)
    page.check("#show-rejected")
    token = page.locator(".drafted .token").first
    token.hover()
    expect(page.locator("#details")).to_contain_text("onerror")
    assert token.text_content() == page.locator(".run h2").text_content() == MARKUP
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("window.hacked") is None


def test_the_keyboard_alone_reaches_every_token_and_its_details(page: Page, recorded: dict[str, Any]) -> None:
    open_recordings(page, recorded)
    page.locator(".drafted .text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    details = page.locator("#details")
    expect(details).to_be_visible()
    for fact in ("drafted by", "p, the target's", "target's tokens", "drafter's tokens", "pass"):
        expect(details).to_contain_text(fact)
    marked = page.locator(".drafted .token.is-marked")
    assert marked.evaluate("node => [...document.querySelectorAll('.drafted .text .token')].indexOf(node)") == 1
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()
