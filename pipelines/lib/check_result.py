"""The result of one part of a measurement."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a part found."""

    figures: dict[str, Any]
    assertions: dict[str, bool]
    """A sentence that people may rely on -> whether it held."""

    def plain_data(self) -> dict[str, Any]:
        """For JSON."""
        return {"figures": self.figures, "promises": self.assertions}
