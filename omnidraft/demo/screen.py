"""What the demo shows while it works: bars and spinners on a terminal, and in a file a line when something begins."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

REFRESH_PER_S = 2.0
"""The refresh rate of the screen, low so that drawing does not disturb the measurement."""

console = Console()


@contextmanager
def spinner(title: str) -> Iterator[None]:
    """Show that something is going on, and at its end how long it took."""
    started = time.monotonic()
    _announce(title)
    with console.status(title, refresh_per_second=REFRESH_PER_S):
        yield
    console.print(f"{title}: {time.monotonic() - started:.0f} s", soft_wrap=True)


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar, and yield what advances it by one."""
    _announce(title)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=REFRESH_PER_S) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def downloads(title: str) -> Iterator[Progress]:
    """Say what is looked for, and yield what shows the bytes of each download."""
    console.print(f"{title} ...", soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def _announce(title: str) -> None:
    """Say what begins where there is no terminal, as nothing is drawn there before the end."""
    if not console.is_terminal:
        console.print(f"{title} ...", soft_wrap=True)
