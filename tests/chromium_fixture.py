"""A real browser: Debian's Chromium, driven by Playwright; else a skip that says why.

OMNIDRAFT_REQUIRE_CHROMIUM=1 turns the skip into a failure.
"""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

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
