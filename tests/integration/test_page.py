"""The page in a real browser: it asks, compares, replays, and shows every text as text."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from omnidraft.config import ApiKey, WorkerSettings
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.telemetry.metrics import CountingMetrics
from tests.chromium_fixture import chromium as chromium
from tests.http_server import served
from tests.page_recordings import recording
from tests.tiny_engine import PATIENCE_S, tiny_worker

KEY = "sk-for-the-browser-0123"
QUESTION = "How many clips did Natalia sell?"
PIECES = ("N", "atal", "ia", " sold", " ", "4", "8", " clips", ",", " To", " AV", "ai", "l", ".")
PLACES_OF_LETTERS = """(text) => {
  const undivided = text.cloneNode(false);
  undivided.textContent = [...text.querySelectorAll(".token")].map((token) => token.textContent).join("");
  text.after(undivided);
  const places = (node) => {
    const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
    const found = [], from = node.getBoundingClientRect();
    for (let part = walker.nextNode(); part; part = walker.nextNode()) {
      if (part.parentElement.closest(".rejected")) continue;
      for (let at = 0; at < part.length; at++) {
        const range = document.createRange();
        range.setStart(part, at);
        range.setEnd(part, at + 1);
        const box = range.getBoundingClientRect();
        found.push([box.left - from.left, box.top - from.top]);
      }
    }
    return found;
  };
  return [places(text), places(undivided)];
}"""
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


def test_a_text_that_ends_early_is_not_identical(page: Page, recorded: dict[str, Any]) -> None:
    shorter = copy.deepcopy(recorded)
    num = len(shorter["drafted"]["end"]["ids"])
    del shorter["drafted"]["end"]["ids"][-1]
    open_recordings(page, shorter)
    expect(page.locator(".verdict.is-bad")).to_contain_text(f"NOT identical: the texts differ from token {num} on")


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


def test_rejected_drafts_are_struck_through_on_demand(page: Page, recorded: dict[str, Any]) -> None:
    open_recordings(page, recorded)
    rejected = page.locator(".drafted .rejected")
    assert rejected.count() > 0
    expect(rejected.first).to_be_hidden()
    page.check("#show-rejected")
    expect(rejected.first).to_be_visible()
    assert "line-through" in rejected.first.evaluate("node => getComputedStyle(node).textDecorationLine")


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


def test_the_clock_shows_what_had_been_drawn_at_its_moment(page: Page, recorded: dict[str, Any]) -> None:
    open_recordings(page, recorded)
    times = [each["at_ms"] for each in recorded["plain"]["passes"]]
    middle = int(times[len(times) // 2]) + 1
    set_clock = "(node, ms) => { node.value = ms; node.dispatchEvent(new Event('input')); }"
    page.locator(".slider").evaluate(set_clock, middle)
    for lane in ("plain", "drafted"):
        num_drawn = sum(each["at_ms"] <= middle for each in recorded[lane]["passes"])
        assert page.locator(f".{lane} .pass:not(.later)").count() == num_drawn
    page.keyboard.press("Space")
    expect(page.locator(".run")).to_have_class("run panel is-over")


def test_a_text_in_tokens_and_passes_has_every_letter_where_the_undivided_text_has_it(
    page: Page, recorded: dict[str, Any]
) -> None:
    spelled = copy.deepcopy(recorded)
    for lane in ("plain", "drafted"):
        tokens = [token for each in spelled[lane]["passes"] for token in each["tokens"]]
        for number, token in enumerate(tokens):
            token |= {"text": PIECES[number % len(PIECES)], "num_bytes": 1}
    open_recordings(page, spelled)
    for lane in ("plain", "drafted"):
        divided, undivided = page.locator(f".{lane} .text").evaluate(PLACES_OF_LETTERS)
        assert len(divided) > len(PIECES)
        assert divided == [pytest.approx(place, abs=0.5) for place in undivided]


def test_at_every_moment_tokens_a_second_times_seconds_are_the_tokens(page: Page, recorded: dict[str, Any]) -> None:
    slowed = copy.deepcopy(recorded)
    for lane, wait_ms in (("plain", 9_000.0), ("drafted", 8_000.0)):
        for number, each in enumerate(slowed[lane]["passes"]):
            each["at_ms"] = wait_ms + 2_000.0 * number
    open_recordings(page, slowed)
    set_clock = "(node, ms) => { node.value = ms; node.dispatchEvent(new Event('input')); }"
    for moment_ms in (20_000, 10**6):
        page.locator(".slider").evaluate(set_clock, moment_ms)
        for lane in ("plain", "drafted"):
            figures = dict(
                zip(*(page.locator(f".{lane} {tag}").all_text_contents() for tag in ("dt", "dd")), strict=True)
            )
            num_tokens = float(figures["passes"]) * float(figures["tokens a pass"])
            assert float(figures["tokens/s"]) == pytest.approx(num_tokens / float(figures["seconds"]), abs=0.06)
    ratio = slowed["plain"]["passes"][-1]["at_ms"] / slowed["drafted"]["passes"][-1]["at_ms"]
    assert page.locator(".numbers strong").text_content() == f"{ratio:.2f}x faster"


def test_who_drafted_a_token_is_told_by_more_than_its_colour(page: Page) -> None:
    styles = page.locator("#legend .token").evaluate_all(
        "all => all.map(node => getComputedStyle(node)).map(style => style.textDecorationColor === 'rgba(0, 0, 0, 0)'"
        " ? 'none' : style.textDecorationStyle)"
    )
    assert len(styles) == len(set(styles)) == 6


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_needs_no_sideways_scrolling(
    chromium: Browser, url: str, recorded: dict[str, Any], scheme: Any
) -> None:
    page = chromium.new_page(viewport={"width": 340, "height": 700}, color_scheme=scheme, reduced_motion="reduce")
    page.goto(url)
    open_recordings(page, recorded)
    assert page.evaluate("document.documentElement.scrollWidth") <= 340
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background.removeprefix("rgb(").removesuffix(")").split(","))
    assert (brightness < 300) == (scheme == "dark")
    page.close()


def test_what_is_no_recording_is_refused_in_words(page: Page) -> None:
    page.set_input_files("#file", {"name": "a.json", "mimeType": "application/json", "buffer": b"[]"})
    expect(page.locator("#status")).to_contain_text("not a recording of this page")
