"""What a part of the measurement is asked to do, and what it tells."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ServeBenchPlan:
    """Sizes of one measurement."""

    out: Path
    target: str
    """`tiny` is a random model; so is the drafter."""
    drafter: str
    repeats: int
    """Of every way to ask, where overhead is measured."""
    tokens: int
    clients: int
    seconds: float
    """Of load."""
    swaps: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What a part found."""

    figures: dict[str, Any]
    promises: dict[str, bool]
    """A sentence that people may rely on -> whether it held."""

    def plain_data(self) -> dict[str, Any]:
        """For JSON."""
        return {"figures": self.figures, "promises": self.promises}


def ms(seconds: float) -> float:
    """For reports: milliseconds with three places."""
    return round(seconds * 1000, 3)
