"""`omnidraft chat`: talk with a target in the terminal, and see who drafted each token.

The target runs in this process, or behind a running server (`--url`). Ctrl-C stops an answer, Ctrl-D ends the chat.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.style import Style
from rich.text import Text

from omnidraft.cli.options import Config, Engine, Quantize, Snapshot, download_bars, printable
from omnidraft.errors import OmnidraftError, RequestError

if TYPE_CHECKING:
    from omnidraft.cli.chat_partners import Partner


SOURCES: Mapping[str, tuple[str, str]] = {
    "direct": ("drafter, direct", "bright_blue"),
    "split": ("drafter, split", "green"),
    "merge": ("drafter, merge", "magenta"),
    "memory": ("suffix memory", "yellow"),
    "forced": ("forced by the grammar", "bright_red"),
}
"""Source -> its name and colour. What nobody drafted, the target's own, has the terminal's colour."""
_MEMORY = ("lookup", "suffix", "prediction")
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


API_KEY_VARIABLE = "OMNIDRAFT_API_KEY"


def chat(
    url: Annotated[str | None, typer.Option(help="Talk with this server, such as http://127.0.0.1:8000.")] = None,
    target: Annotated[str | None, typer.Option(help="The model that answers; with --url, one that it serves.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Small model that drafts; any tokenizer, or none.")] = None,
    engine: Engine = None,
    snapshot: Snapshot = None,
    quantize: Quantize = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first message.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers, whatever drafts.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Stop answers after so many tokens.")] = None,
    config_path: Config = None,
) -> None:
    """Talk with a target: every token has the colour of who drafted it.

    Ctrl-C stops an answer, Ctrl-D ends. A server's API key is read from OMNIDRAFT_API_KEY.
    """
    sampling = {"temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    if url is not None:
        local = {"--drafter": drafter, "--engine": engine, "--snapshot": snapshot, "--quantize": quantize}
        if given := [name for name, value in {**local, "--config": config_path}.items() if value is not None]:
            raise RequestError(f"{', '.join(given)}: what answers at --url has its own")
        _talk(_server(url, target, sampling), system)
        return
    models = {"target": target, "drafter": drafter, "engine": engine, "precision": quantize}
    _talk(_local(models, snapshot, config_path, sampling), system)


def _server(url: str, target: str | None, sampling: dict[str, Any]) -> "Partner":
    from omnidraft.cli.chat_partners import ServerPartner

    return ServerPartner(url, target, os.environ.get(API_KEY_VARIABLE), **sampling)


def _local(
    models: dict[str, Any], snapshot: str | None, config_path: Path | None, sampling: dict[str, Any]
) -> "Partner":
    from omnidraft import assembly, config
    from omnidraft.cli.chat_partners import LocalPartner
    from omnidraft.telemetry.metrics import CountingMetrics

    settings = config.load(config_path, models=models)
    with download_bars() as progress:
        worker = assembly.engine(settings, CountingMetrics(), snapshot=snapshot, progress=progress)
    return LocalPartner(worker.engine, **sampling)


def _talk(partner: "Partner", system: str | None) -> None:
    """Answer one message after another, until there are no more. Only a person goes on after an answer that failed.

    Raises:
        OmnidraftError: an answer failed, and the messages come from a file or a pipe.
    """
    screen = ChatScreen(sys.stdout)
    screen.show_beginning(partner.name)
    messages = [] if system is None else [{"role": "system", "content": system}]
    with closing(partner):
        for text in _messages(screen.ask):
            messages.append({"role": "user", "content": text})
            answer = _answer(partner, messages, screen)
            if answer is None:
                messages.pop()  # nothing was answered: the next message takes its place
            else:
                messages.append({"role": "assistant", "content": answer})


def _messages(ask: Callable[[], str]) -> Iterator[str]:
    """Yield what the user writes, without empty lines, up to Ctrl-D. Ctrl-C drops a line that is being written."""
    while True:
        try:
            text = ask().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if text:
            yield text


def _answer(partner: "Partner", messages: list[dict[str, str]], screen: ChatScreen) -> str | None:
    """Show an answer while it is written and return it, also when Ctrl-C cut it off; None when there is none.

    Raises:
        OmnidraftError: it failed, and nobody is at the keyboard.
    """
    shown: list[str] = []
    try:
        with closing(partner.answer(messages)) as spans:
            for text, source in spans:
                shown.append(text)
                screen.show(text, source)
    except KeyboardInterrupt:
        screen.end("stopped")
    except OmnidraftError as exc:
        screen.end(None)
        if not sys.stdin.isatty():
            raise
        print(f"omnidraft: {exc}", file=sys.stderr)
    else:
        screen.end(partner.summary)
    return "".join(shown) or None
