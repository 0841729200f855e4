"""A progress bar with times on stderr; where that is no terminal, a line at the start and every LINE_EVERY_S."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 30.0


@contextmanager
def bar(title: str, total: int | None, *, transient: bool = False) -> Iterator[Callable[..., None]]:
    """Show a bar and yield a function that advances it, by one or by a number.

    Args:
        total: None where it is not known.
        transient: on a terminal, remove the bar at its end.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, speed_estimate_period=600, transient=transient) as progress:
        task = progress.add_task(title, total=total)

        def show_line() -> None:
            end = "" if total is None else f" of {total}"
            console.print(f"{title}: {progress.tasks[0].completed:g}{end}", markup=False, highlight=False)

        shown_s = time.monotonic()
        if not console.is_terminal:
            show_line()

        def advance(by: int = 1) -> None:
            nonlocal shown_s
            progress.advance(task, by)
            if not console.is_terminal and time.monotonic() - shown_s > LINE_EVERY_S:
                shown_s = time.monotonic()
                show_line()

        yield advance
