"""The result of one part of a measurement: its figures, and the assertions that were checked on them."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from omnidraft.errors import OmnidraftError

EXIT_BROKEN = 1


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The figures and assertions of one part."""

    figures: dict[str, Any]
    assertions: dict[str, bool]
    """A sentence that people may rely on -> whether it held."""

    def plain_data(self) -> dict[str, Any]:
        """Return the fields of the JSON report."""
        return {"figures": self.figures, "promises": self.assertions}


def run_part(name: str, part: Callable[[], CheckResult]) -> dict[str, Any]:
    """Run a part and return its fields of the report; one that fails is a broken assertion."""
    print(f"{name} ...", file=sys.stderr)
    started = time.monotonic()
    try:
        result = part()
    except OmnidraftError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        result = CheckResult({}, {f"{name} runs to its end: {exc}": False})
    return result.plain_data() | {"seconds": round(time.monotonic() - started, 1)}


def broken_assertions(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the assertions of a report's parts that did not hold, each after the name of its part."""
    return [f"{name}: {each}" for name, part in parts.items() for each, held in part["promises"].items() if not held]


def exit_if_broken(broken: Sequence[str]) -> None:
    """Print the broken assertions; raise typer.Exit with code 1 when there are any."""
    for each in broken:
        print(f"BROKEN: {each}")
    if broken:
        raise typer.Exit(EXIT_BROKEN)
