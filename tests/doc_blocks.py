"""The code of the pages for people: fenced and indented blocks, and what is between backticks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
SHELL = ("", "bash", "sh")
"""Languages of blocks with commands; indented blocks have none."""
_NOTE = re.compile(r"<!-- docs-test: (.+?) -->\s*$")
_FENCE = re.compile(r"\s*```(\w*)")


@dataclass(frozen=True, slots=True)
class Block:
    """One block of code."""

    page: Path
    line: int
    language: str
    text: str
    note: str | None
    """What a comment above it, which readers do not see, tells docs-test."""

    @property
    def place(self) -> str:
        """Return page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    lines, at, before = page.read_text().split("\n"), 0, ""
    while at < len(lines):
        note, start = _NOTE.search(before), at
        if fence := _FENCE.match(lines[at]):
            at = next(end for end in range(at + 1, len(lines)) if lines[end].strip() == "```") + 1
            language, inside = fence[1] or "text", lines[start + 1 : at - 1]
        elif lines[at].startswith("    ") and not lines[at - 1].strip():
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            language, inside = "", [line[4:] for line in lines[start:at]]
        else:
            before = lines[at] if lines[at].strip() else before
            at += 1
            continue
        yield Block(page, start + 1, language, "\n".join(inside).strip("\n"), note and note[1])
        before = ""


def commands(block: Block) -> list[str]:
    """Return the shell commands of a block, each on one line."""
    joined = re.sub(r"\s*\\\n\s*", " ", block.text)
    return [line for line in map(str.strip, joined.split("\n")) if line and not line.startswith("#")]


def inline_code(page: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of what is between backticks outside blocks."""
    fenced = False
    for number, line in enumerate(page.read_text().split("\n"), 1):
        fenced ^= bool(_FENCE.match(line))
        if not fenced and not line.startswith("    "):
            yield from ((number, code) for code in re.findall(r"`([^`]+)`", line))


@cache
def anchors(page: Path) -> set[str]:
    """Return them as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
