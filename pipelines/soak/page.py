"""The soak as a page: what is promised, how it was tried, what came of it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.soak import pictures
from pipelines.soak.methods import METHODS

HIDDEN = (
    *("kills_at_s", "answers_per_10s", "peaks_rss_mib", "written_by_second", "read_by_second", "windows"),
    *("agreements", "changed_at"),
)
"""Figures that are pictures."""


def write(report: Mapping[str, Any], path: Path) -> None:
    """The page, and its pictures beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = pictures.draw(report["parts"], path.parent, path.stem)
    path.write_text("\n".join(_lines(report, drawn)) + "\n")


def _lines(report: Mapping[str, Any], drawn: Mapping[str, str]) -> Iterator[str]:
    yield "# Reliability\n"
    yield "Written by `make soak` (`python -m pipelines.soak --help`). Nothing here is typed by hand.\n"
    yield "| part | promise | held |"
    yield "|---|---|---|"
    for name, told in report["parts"].items():
        for promise, held in told["promises"].items():
            yield f"| {name} | {promise} | {'yes' if held else '**no**'} |"
    yield ""
    for name, told in report["parts"].items():
        yield from _part(name, told, drawn.get(name))


def _part(name: str, told: Mapping[str, Any], picture: str | None) -> Iterator[str]:
    title, how = METHODS[name]
    yield f"## {title}\n"
    yield f"{how}\n"
    if picture is not None:
        yield f"![{title}]({picture})\n"
    yield "| figure | value |"
    yield "|---|---|"
    for figure, value in _flat(told["figures"]):
        yield f"| {figure} | {value} |"
    machine = told["machine"]
    yield (
        f"\n`{told['command']}`, {told['seconds']:.0f} s, {machine['cores']} cores of {machine['processor']}, "
        f"commit {machine['commit']}.\n"
    )


def _flat(figures: Mapping[str, Any], before: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Names with their groups before them; words instead of underscores."""
    for name, value in figures.items():
        names = (*before, name.replace("_", " "))
        if name in HIDDEN or value in ([], {}):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, names)
        elif isinstance(value, list):
            yield ": ".join(names), ", ".join(map(str, value))
        else:
            yield (
                ": ".join(names),
                f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value),
            )
