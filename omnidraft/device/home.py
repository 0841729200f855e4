"""The folder in which one user's drafter lives: log and snapshots of one pair, held by one process at a time.

<home>/pair.json    target, drafter and how it learns; a home of others is refused
<home>/log.db       what was asked and not learned yet
<home>/snapshots/   the versions of the drafter
"""

import json
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from omnidraft import files
from omnidraft.errors import ConfigError
from omnidraft.private_files import PRIVATE, make_folder

_PAIR, _LOCK = "pair.json", ".lock"


class DeviceHome:
    """A folder that this process holds until `close`."""

    def __init__(self, folder: Path) -> None:
        """Create the folder if it is missing. Raises ConfigError when another process holds it, or it cannot be
        used."""
        self.folder = folder
        self._lock = FileLock(folder / _LOCK, timeout=0, thread_local=False)
        try:
            make_folder(folder)
            self._lock.acquire()
        except Timeout as exc:
            advice = "close the other LLM(learn=True), or give this one a home of its own"
            raise ConfigError(f"another process, or another LLM, learns in {folder}; {advice}") from exc
        except OSError as exc:
            raise ConfigError(f"{folder} cannot be the home of a drafter: {exc}") from exc

    def claim(self, pair: Mapping[str, str]) -> None:
        """Make it the home of this pair. Raises ConfigError when it is that of another."""
        path = self.folder / _PAIR
        try:
            known = json.loads(path.read_bytes())
        except FileNotFoundError:
            files.write_text(path, json.dumps(dict(pair), indent=2), PRIVATE)
            return
        except ValueError as exc:
            raise ConfigError(f"{path} is damaged: {exc}; give another home, or restore the file") from exc
        if not isinstance(known, dict):
            raise ConfigError(f"{path} is damaged: a {type(known).__name__}; give another home, or restore the file")
        for name, value in pair.items():
            if known.get(name) != value:
                advice = f"each pair has a home of its own: give another folder, or {name} {known.get(name)}"
                raise ConfigError(f"{self.folder} is the home of {name} {known.get(name)}, not {value}; {advice}")

    def close(self) -> None:
        """Let another process hold it."""
        self._lock.release()
