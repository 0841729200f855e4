"""The tables of a report, on the terminal and as a page in Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class PageSection:
    """A table with its title, and what is to be said around it."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    about: str | None = None
    """A paragraph of the page above the table."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headings):
                raise ValueError(f"{self.title}: {row} has not {len(self.headings)} cells")


def show(sections: Iterable[PageSection]) -> None:
    """Print the tables."""
    console = Console()
    for section in sections:
        table = Table(title=section.title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        for number, heading in enumerate(section.headings):
            table.add_column(heading, no_wrap=number == 0, overflow="fold")
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
        print(*section.notes, sep="\n", end="\n" if section.notes else "")


def markdown(title: str, about: Iterable[str], sections: Iterable[PageSection]) -> str:
    """Return the page: what it is about, a paragraph each, and a table for each section."""
    lines = [f"# {title}"]
    for paragraph in about:
        lines += ["", paragraph]
    for section in sections:
        lines += ["", f"## {section.title}", *(("", section.about) if section.about else ()), ""]
        lines += [_line(section.headings), _line(["---"] * len(section.headings)), *map(_line, section.rows)]
        for note in section.notes:
            lines += ["", note]
    return "\n".join(lines) + "\n"


def number(value: float | None, places: int) -> str:
    """Return a number with so many decimal places, a dash where there is none."""
    return "-" if value is None else f"{value:.{places}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
