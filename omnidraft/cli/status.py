"""`omnidraft status`: the status of the fleet, as tables or as JSON."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from omnidraft import config
from omnidraft.cli.options import AsJson, Config, age, printable, whole_table

if TYPE_CHECKING:
    from omnidraft.fleet.overview import NamedVersion, Overview, TargetOverview
    from omnidraft.fleet.workers import WorkerStatus


_ANY_WIDTH = 10_000


class FittingTable:
    """Groups of rows, the first of which alone has a cell in the first column. A terminal that is narrower than the
    table shows each group on its side: below its first cell, a row for each of the other columns that is not empty."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a row; cells that are missing at its end are empty."""
        self._rows.append((*map(printable, cells), *[""] * (len(self._names) - len(cells))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """See rich.console.ConsoleRenderable."""
        table = whole_table(*self._names)
        for row in self._rows:
            table.add_row(*row)
        wanted = console.measure(table, options=options.update(width=_ANY_WIDTH)).maximum
        if wanted <= options.max_width or not self._rows:
            yield table
            return
        for group in _groups(self._rows):
            yield Text(f"{self._names[0]} {group[0][0]}", style="bold", overflow="fold")
            yield self._on_its_side(group)

    def _on_its_side(self, rows: list[tuple[str, ...]]) -> Table:
        columns = [Column(overflow="fold") for _ in rows]
        table = Table(Column(no_wrap=True, style="bold"), *columns, show_header=False)
        for name, cells in zip(self._names[1:], list(zip(*rows, strict=True))[1:], strict=True):
            if any(cells):
                table.add_row(name, *cells)
        return table


def _groups(rows: Iterable[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    groups: list[list[tuple[str, ...]]] = []
    for row in rows:
        if row[0] or not groups:
            groups.append([])
        groups[-1].append(row)
    return groups


WATCH_S = 2.0


def status(
    worker: Annotated[
        list[str] | None, typer.Option(help="URL of a worker, repeatable; without it those that announced themselves.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again every two seconds, until Ctrl-C.")] = False,
    config_path: Config = None,
    as_json: AsJson = False,
) -> None:
    """Print versions, the learner's lag, dead letters and workers.

    The exit code is 1 when a service does not answer, or a worker does not serve the champion.
    """
    from omnidraft import assembly

    settings, urls = config.load(config_path), [url.rstrip("/") for url in worker or ()]
    console = Console(markup=False, highlight=False)
    try:
        while True:
            with Console(stderr=True).status("asking the log, the registry and the workers"):
                fleet = assembly.overview(settings, urls)
            if watch and console.is_terminal and not as_json:
                console.clear()
            _show(fleet, console, as_json=as_json)
            if not watch:
                break
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    raise typer.Exit(1 if fleet.problems else 0)


def _show(fleet: "Overview", console: Console, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_json(fleet)), flush=True)
    else:
        console.print(Group(*_parts(fleet)))


def _as_json(fleet: "Overview") -> dict[str, Any]:
    totals = [None if each.lag is None else sum(each.lag.values()) for each in fleet.targets]
    fields = asdict(fleet)
    return fields | {"targets": [each | {"total_lag": n} for each, n in zip(fields["targets"], totals, strict=True)]}


def _parts(fleet: "Overview") -> Iterable[RenderableType]:
    yield _targets(fleet)
    yield from _events(fleet)
    yield _log_line(fleet)
    yield _workers(fleet.workers)
    yield from (Text(f"problem: {printable(problem)}", style="red") for problem in fleet.problems)
    yield from (Text(printable(note), style="yellow") for note in fleet.notes)


def _targets(fleet: "Overview") -> FittingTable:
    table = FittingTable("target", "name", "version", "age", "records", "agreement before", "after", "lag", "learning")
    for each in fleet.targets:
        shared = (_lag(each), {None: "?", True: "paused", False: "on"}[each.is_learning_paused])
        if not each.standings:
            cell = "?" if each.standings is None else "no version"
            table.add_row(each.target, cell, *[""] * 5, *shared)
            continue
        for number, standing in enumerate(each.standings):
            shown = shared if number == 0 else ("", "")
            table.add_row("" if number else each.target, *_standing(standing, fleet.taken_ms), *shown)
    return table


def _events(fleet: "Overview") -> Iterable[Text]:
    """Yield lines about canaries and drifts."""
    for each in fleet.targets:
        if each.canary is not None:
            yield Text(
                f"{each.target}: canary: version {each.canary.version} at {each.canary.share:.1%} of the requests"
            )
        for drifting in each.drifting or ():
            yield Text(f"{each.target}: drift: {printable(drifting.reason or drifting.tenant)}", style="yellow")
        if each.changes:
            last = each.changes[-1]
            version = "" if last.version is None else f" version {last.version}"
            why = f": {printable(last.reason)}" if last.reason else ""
            what = f"{printable(' '.join(last.key))}{version}{' is over' if last.is_over else ''}{why}"
            yield Text(f"{each.target}: {age(fleet.taken_ms - last.at_ms)} ago: {what}")


def _standing(standing: "NamedVersion", now_ms: int) -> tuple[str, ...]:
    return (
        standing.name,
        str(standing.version),
        age(now_ms - standing.created_ms),
        f"{standing.num_records:,}",
        _number(standing.agreement_before),
        _number(standing.agreement_after),
    )


def _lag(each: "TargetOverview") -> str:
    """Format the total lag, and that of each partition if there are several."""
    if each.lag is None:
        return "?"
    total = f"{sum(each.lag.values()):,}"
    return total if len(each.lag) < 2 else f"{total} ({_by_name(each.lag.items())})"


def _log_line(fleet: "Overview") -> Text:
    ends, dead_letters = fleet.trace_ends, fleet.dead_letters
    traces = "?" if ends is None else f"{sum(ends.values()):,} ({_by_name(ends.items())})" if ends else "none yet"
    if dead_letters is None:
        return Text(f"trace records: {traces}; dead letters: ?")
    reasons = f" ({_by_name(dead_letters.by_reason.items())})" if dead_letters.by_reason else ""
    return Text(f"trace records: {traces}; dead letters: {dead_letters.number:,}{reasons}")


def _workers(workers: Iterable["WorkerStatus"]) -> FittingTable:
    table = FittingTable("worker", "state", "target", "version", "requests", "failed", "agreement", "tokens per pass")
    for each in workers:
        state = "ready" if each.problem is None else _in_short(each.problem)
        for number, served in enumerate(each.served):
            counts = (str(served.num_requests), str(served.num_failed), _number(served.agreement))
            version = "base" if served.version is None else str(served.version)
            shown = ("", "") if number else (each.url, state)
            table.add_row(*shown, served.target, version, *counts, _number(served.tokens_per_pass))
        if not each.served:
            table.add_row(each.url, state)
    return table


def _in_short(problem: str) -> str:
    """Return the beginning of a worker's problem, which stands below the table in full."""
    return problem.partition(":")[0]


def _by_name(counts: Iterable[tuple[object, int]]) -> str:
    return ", ".join(f"{printable(str(name))}: {number:,}" for name, number in counts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
