"""The terminal of a chat: answers with each token in the colour of who drafted it, and plain text where the output is
no terminal."""

import sys
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.style import Style
from rich.text import Text

from omnidraft.cli.options import printable

SOURCES: Mapping[str, tuple[str, str]] = {
    "direct": ("drafter, direct", "bright_blue"),
    "split": ("drafter, split", "green"),
    "merge": ("drafter, merge", "magenta"),
    "memory": ("suffix memory", "yellow"),
    "forced": ("forced by the grammar", "bright_red"),
}
"""Source -> its name and colour. What nobody drafted, the target's own, has the terminal's colour."""
_MEMORY = ("lookup", "suffix")
_PROMPT = "> "


class ChatScreen:
    """Shows one chat."""

    def __init__(self, output: TextIO) -> None:
        self._console = Console(file=output, highlight=False, soft_wrap=True)
        self._is_terminal = self._console.is_terminal

    def show_beginning(self, name: str) -> None:
        """Say who answers, what the colours mean, and how to end; nothing without a terminal."""
        if not self._is_terminal:
            return
        self._console.print(Text(f"{printable(name)}: Ctrl-C stops an answer, Ctrl-D ends the chat", style="bold"))
        legend = Text("target itself")
        for label, colour in SOURCES.values():
            legend.append("  ").append(label, style=colour)
        self._console.print(legend)

    def ask(self) -> str:
        """Return the next message. Raises EOFError, KeyboardInterrupt."""
        return input(_PROMPT if self._is_terminal and sys.stdin.isatty() else "")

    def show(self, text: str, source: str | None) -> None:
        """Show a piece of an answer."""
        if self._is_terminal:
            self._console.print(Text(_visible(text), style=style_of(source)), end="")
        else:
            self._console.file.write(text)
        self._console.file.flush()

    def end(self, remark: str | None) -> None:
        """End an answer; a remark is for terminals only."""
        if not self._is_terminal:
            self._console.file.write("\n")
            return
        self._console.print()
        if remark:
            self._console.print(Text(f"[{remark}]", style="dim"))


def style_of(source: str | None) -> Style:
    """Return the style of what this source drafted."""
    if source is None:
        return Style()
    return Style(color=SOURCES["memory" if source in _MEMORY else source][1])


def _visible(text: str) -> str:
    """Replace the control characters that a model may write, but for line ends and tabs."""
    return "".join(char if char in "\n\t" else printable(char) for char in text)
