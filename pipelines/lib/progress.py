"""A progress bar with times on stderr; a line every LINE_EVERY_S where that is no terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 30.0


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar and yield a function that advances it, by one or by a number."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, speed_estimate_period=600) as progress:
        task = progress.add_task(title, total=total)
        shown_s = time.monotonic()

        def advance(by: int = 1) -> None:
            nonlocal shown_s
            progress.advance(task, by)
            if not console.is_terminal and time.monotonic() - shown_s > LINE_EVERY_S:
                shown_s = time.monotonic()
                console.print(f"{title}: {progress.tasks[0].completed:g} of {total}")

        yield advance
