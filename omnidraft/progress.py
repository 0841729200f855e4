"""What a program says while it works: the stages of a start, each before it begins, and a progress bar with times on
stderr; where that is no terminal, a line after FIRST_LINE_S and every LINE_EVERY_S."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

stages = logging.getLogger(__name__)
"""Is told each stage of a start that may take seconds, before it begins. Services have it in their log, commands show
it on stderr."""

FIRST_LINE_S = 2.0
LINE_EVERY_S = 30.0


@contextmanager
def bar(title: str, total: int | None, *, transient: bool = False) -> Iterator[Callable[..., None]]:
    """Show a bar and yield a function that advances it, by one or by a number, maybe to another total.

    Args:
        total: None where it is not known.
        transient: leave nothing at the end but the lines.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    progress = Progress(
        *columns,
        *times,
        console=console,
        speed_estimate_period=600,
        transient=transient,
        disable=transient and not console.is_terminal,
    )
    task = progress.add_task(title, total=total)
    shown_s = time.monotonic()

    def show_line() -> None:
        shown = progress.tasks[0]
        end = "" if shown.total is None else f" of {shown.total:g}"
        console.print(f"{title}: {shown.completed:g}{end}", markup=False, highlight=False)

    def advance(by: int = 1, of: int | None = None) -> None:
        nonlocal shown_s
        progress.update(task, advance=by, total=of)
        if not console.is_terminal and time.monotonic() - shown_s > LINE_EVERY_S:
            shown_s = time.monotonic()
            show_line()

    first_line = threading.Timer(FIRST_LINE_S, show_line)
    first_line.daemon = True
    if not console.is_terminal:
        first_line.start()
    try:
        with progress:
            yield advance
    finally:
        first_line.cancel()
