"""Pictures of the page for the documentation: asks a running worker in Chromium, light, dark and on a narrow screen.

Start a worker first (`omnidraft serve ...`), on a machine that computes nothing else: the lanes are measured.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import httpx
import typer
from playwright.sync_api import Browser, Page, sync_playwright

from omnidraft.errors import RequestError
from omnidraft.hosts import process

CHROMIUM = "/usr/bin/chromium"
QUESTION = (
    "Natalia sold clips to 48 friends in April, and half as many in May. How many did she sell in all? "
    "Explain step by step."
)
ANSWER_TIMEOUT_MS = 300_000.0
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Picture:
    """One screenshot."""

    name: str
    scheme: Literal["light", "dark"]
    width: int
    height: int
    has_details: bool = False
    """Whether a token's details are open and rejected drafts are shown."""


PICTURES = (
    Picture("page.png", "light", 1180, 1010, has_details=True),
    Picture("page-dark.png", "dark", 1180, 880),
    Picture("page-narrow.png", "light", 400, 1300),
)


def main(
    url: Annotated[str, typer.Option(help="A running worker.")] = "http://127.0.0.1:8000/",
    out: Annotated[Path, typer.Option(help="The folder for the pictures and the recording.")] = Path("runs/page"),
    question: Annotated[str, typer.Option(help="What is asked, after a short question for warm-up.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer.")] = 128,
    recording: Annotated[Path | None, typer.Option(help="A file that the page saved; nothing is asked then.")] = None,
    chromium: Annotated[str, typer.Option(help="The browser.")] = CHROMIUM,
) -> None:
    """Ask once, save the recording, and take every picture of it."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        httpx.get(url, timeout=10.0).raise_for_status()
    except httpx.HTTPError as exc:
        raise RequestError(f"no page at {url}: {exc}; start `omnidraft serve`, or name another --url") from exc
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        for picture in PICTURES:
            recording = recording or _record(browser, url, question, max_tokens, out)
            _take(browser, url, recording, picture, out)
        browser.close()


def _record(browser: Browser, url: str, question: str, max_tokens: int, out: Path) -> Path:
    """Ask and return the file of the recording. A short first question warms the worker up."""
    page = browser.new_page()
    page.set_default_timeout(ANSWER_TIMEOUT_MS)
    for num_tokens in (WARM_UP_TOKENS, max_tokens):
        page.goto(url)
        page.fill("#question", question)
        page.fill("#max-tokens", str(num_tokens))
        page.click("#send")
        page.locator(".verdict.is-good").wait_for()
    with page.expect_download() as download:
        page.click("#save")
    path = out / "recording.json"
    download.value.save_as(path)
    page.close()
    return path


def _take(browser: Browser, url: str, recording: Path, picture: Picture, out: Path) -> None:
    size = {"width": picture.width, "height": picture.height}
    page = browser.new_page(color_scheme=picture.scheme, viewport=size, reduced_motion="reduce")  # type: ignore[arg-type]
    page.goto(url)
    page.set_input_files("#file", recording)
    page.locator(".run .verdict.is-good").first.wait_for()
    if picture.has_details:
        _open_details(page)
    page.wait_for_timeout(300)  # the charts' first frames
    page.screenshot(path=out / picture.name)
    page.close()


def _open_details(page: Page) -> None:
    page.check("#show-rejected")
    token = page.locator(".run").first.locator(".drafted .text .token.split, .drafted .text .token.direct").nth(12)
    token.scroll_into_view_if_needed()
    token.hover()


if __name__ == "__main__":
    process.entry("page_pictures", main)
