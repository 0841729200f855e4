"""Cells of a long experiment, each computed once and saved in a JSON file from which an interrupted run goes on."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnidraft.errors import ConfigError
from pipelines.lib import machine, report


class ResultCache:
    """Results by key, saved after each."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        """
        Args:
            options: everything that every cell depends on; a file made with others is refused.

        Raises:
            ConfigError: the file is of another experiment, or none.
        """
        self._path = path
        self.content: dict[str, Any] = {"options": options, "inputs": {}, "made_by": [], "cells": {}}
        if not path.exists():
            return
        try:
            known = json.loads(path.read_text())
            self.content |= {name: known[name] for name in self.content}
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(f"{path} is no file of this experiment: {exc!r}") from exc
        if self.content["options"] != json.loads(json.dumps(options)):
            raise ConfigError(f"{path} was made with other options; name another file, or remove it")

    def get(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return the cell of this key; compute it if it is missing."""
        cells = self.content["cells"]
        if key not in cells:
            cells[key] = compute()
            if (made_by := machine.describe()) not in self.content["made_by"]:
                self.content["made_by"].append(made_by)
            report.save(self.content, self._path)
        return cells[key]

    def require(self, name: str, value: Any) -> None:
        """Check that an input of some cells is what it was when they were computed. Raises ConfigError."""
        if self.content["inputs"].setdefault(name, value) != value:
            raise ConfigError(f"{self._path} was made with another {name}; name another file, or remove it")


def name_of(*parts: object) -> str:
    """Return a short file name that is a hash of these."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
