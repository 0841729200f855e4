"""The costs that an earlier start measured, in a small JSON file of the user's cache."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from omnidraft.files import replace_file

logger = logging.getLogger(__name__)


class CostFile:
    """Seconds by number of rows, of one target on one machine: of its passes by mode, of steps by drafter."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> dict[int, float]:
        """Return the seconds by number of rows; empty when they were not measured, or cannot be read."""
        try:
            stored = json.loads(self._path.read_text())[name]
            seconds = {int(rows): float(each) for rows, each in stored.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or half written
            return {}
        return seconds if all(each > 0 for each in seconds.values()) else {}

    def write(self, name: str, seconds_by_rows: Mapping[int, float]) -> None:
        """Replace the seconds of this name; where nothing can be written the next start measures again."""
        try:
            replace_file(self._path, json.dumps(self._others(name) | {name: dict(seconds_by_rows)}).encode())
        except OSError as exc:
            logger.warning("the next start has to measure again: %s", exc)

    def _others(self, name: str) -> dict[str, object]:
        try:
            stored = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return {other: each for other, each in stored.items() if other != name} if isinstance(stored, dict) else {}
