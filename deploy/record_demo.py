"""Draws a recording of a command's output as an SVG whose lines appear when they did: `make demo-recording`.

    python deploy/record_demo.py docs/demo.svg omnidraft demo

The picture is text and a style sheet, without scripts, so pages may show it as they show any picture.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

PLAYED_S = 20.0
"""The length of the recording, whatever the command took."""
WIDTH, LINE, CHARACTER, MARGIN = 120, 18, 8.4, 16
STYLE = """
text { font: 14px ui-monospace, "DejaVu Sans Mono", monospace; fill: #d8dee9; white-space: pre; opacity: 0;
  animation: shown 0.01s forwards; }
@keyframes shown { to { opacity: 1; } }
@media (prefers-reduced-motion: reduce) { text { animation-delay: 0s !important; } }
"""


def main(picture: str, *command: str) -> int:
    """Run the command, show what it prints, and draw it; return its exit code."""
    lines: list[tuple[float, str]] = []
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append((time.monotonic() - started, line.rstrip("\n")))
    Path(picture).write_text(drawing(" ".join(command), lines), encoding="utf-8")
    return process.returncode


def drawing(title: str, lines: Sequence[tuple[float, str]]) -> str:
    """Return the SVG of lines, each with the second at which it came."""
    rows = [(0.0, f"$ {title}"), *((second, part) for second, line in lines for part in _wrapped(line))]
    scale = PLAYED_S / max(lines[-1][0], 1e-9) if lines else 1.0
    height, width = LINE * len(rows) + 2 * MARGIN, round(CHARACTER * WIDTH + 2 * MARGIN)
    texts = "\n".join(
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (row + 0.75):g}" style="animation-delay:{second * scale:.2f}s">'
        f"{escape(text)}</text>"
        for row, (second, text) in enumerate(rows)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#20242c"/>\n{texts}\n</svg>\n'
    )


def _wrapped(line: str) -> list[str]:
    return [line[at : at + WIDTH] for at in range(0, len(line), WIDTH)] or [""]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
