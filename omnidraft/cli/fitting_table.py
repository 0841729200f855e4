"""A table that stays readable in a narrow terminal."""

from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Column, Table
from rich.text import Text

from omnidraft.cli.options import whole_table

_ANY_WIDTH = 10_000


class FittingTable:
    """Groups of rows, the first of which alone has a cell in the first column. A terminal that is narrower than the
    table shows each group on its side: below its first cell, a row for each of the other columns that is not empty."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a row; cells that are missing at its end are empty."""
        self._rows.append((*cells, *[""] * (len(self._names) - len(cells))))

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
