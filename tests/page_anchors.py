"""The anchors of a page's headings, which links and alerts name."""

import re
from functools import cache
from pathlib import Path


@cache
def anchors(page: Path) -> set[str]:
    """Return them as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
