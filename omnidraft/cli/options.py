"""Options and helpers that several commands share."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Column, Table

from omnidraft.errors import RequestError
from omnidraft.progress import stages

if TYPE_CHECKING:
    from rich.progress import Progress

Config = Annotated[Path | None, typer.Option("--config", help="TOML settings; the environment overrides them.")]
Target = Annotated[str | None, typer.Option(help="The target of the pair; without it models.target.")]
Engine = Annotated[
    Literal["transformers", "llamacpp", "ensemble"] | None, typer.Option("--engine", help="What runs the target.")
]
Snapshot = Annotated[
    str | None, typer.Option(help="Draft with this version, alias or snapshot folder, not with the base drafter.")
]
Quantize = Annotated[
    Literal["auto", "float32", "bfloat16", "packed16", "int8", "int4"] | None,
    typer.Option("--quantize", help="The target's weights: int8 or int4 in groups, or 16 bits, as auto chooses."),
]
"""As config.Precision, which takes a second to import."""
Mode = Literal["fast", "reproducible"]
"""As config.Mode, which takes a second to import."""
MOST_DRAFT_TOKENS = 63
"""As decode.num_draft_tokens, whose section takes a second to import."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _named_tenant(tenant: str) -> str:
    """Return the tenant. Raises RequestError when it is empty, as an unset variable of a shell is."""
    if not tenant:
        raise RequestError("the tenant has no name; give it as its trace records name it")
    return tenant


Tenant = Annotated[str, typer.Argument(help="The tenant as its trace records name it.", callback=_named_tenant)]


def group(about: str) -> typer.Typer:
    """Return a group of commands. Its help is plain text: what colours it takes longer to load than all the rest."""
    return typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None)


def printable(text: str) -> str:
    """Replace the control characters in text from outside."""
    return "".join(char if char.isprintable() else "?" for char in text)


def age(age_ms: float) -> str:
    """Return a duration in its largest unit."""
    age_s = max(age_ms / 1000, 0)
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s / seconds:.1f} {unit}"
    return f"{age_s:.0f} s"


def whole_table(first: str, *others: str) -> Table:
    """Return a table without rows in which nothing is cut off: the first column stays on one line, the others fold."""
    return Table(Column(first, no_wrap=True), *(Column(name, overflow="fold") for name in others))


def show_stages() -> None:
    """Log to stderr, each stage that may take seconds before it begins."""
    from omnidraft.hosts.process import configure_command_logging

    configure_command_logging("omnidraft")
    stages.setLevel(logging.INFO)


@contextmanager
def download_bars() -> "Iterator[Progress]":
    """Show transient progress bars over bytes on stderr, nothing when stderr is not a terminal. Other slow steps log
    their beginning."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    show_stages()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
