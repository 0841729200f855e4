"""Reports as files, mostly JSON, each whole or not there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnidraft.errors import cannot_write
from omnidraft.snapshots import files


def save(report: Mapping[str, Any], path: Path) -> None:
    """Write indented JSON, as `save_text` does."""
    save_text(json.dumps(report, indent=2) + "\n", path)


def save_text(text: str, path: Path) -> None:
    """Write a text, aside first: an interrupted run leaves the last complete report.

    What is no file, such as a pipe at /dev/stdout, is written to directly. Raises RequestError when it cannot be
    written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path.resolve(), text)
    except OSError as exc:
        raise cannot_write(path, exc) from exc
