"""The newest announcement that a process accepted about each subject, in a file that outlives it.

Without it a restarted process would follow an old announcement that somebody put in the place of the newest. Processes
of one machine may share the file; it only ever moves forward.
"""

import logging
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from omnidraft import files
from omnidraft.errors import SignatureRefused, StorageError

LOCK_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class _Accepted(BaseModel):
    model_config = ConfigDict(frozen=True)

    sequence: int
    content: str


_FILE = TypeAdapter(dict[str, _Accepted])


class AcceptedAnnouncements:
    """Sequence and content of the newest announcement by subject. Safe for several processes."""

    def __init__(self, path: Path) -> None:
        """Raises StorageError when the file cannot be read or written, now rather than at the first announcement."""
        self._path = path
        self._known: dict[str, _Accepted] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._lock, timeout=LOCK_TIMEOUT_S):
                self._known = self._read()
                self._write()
        except (OSError, ValidationError, Timeout) as exc:
            raise StorageError(
                f"{path}, which remembers accepted announcements (registry.accepted_file), cannot be used: {exc}"
            ) from exc

    def check(self, subject: str, sequence: int, content: str) -> None:
        """Raise SignatureRefused when a newer announcement about this subject was accepted, unless it said the same."""
        self._merge()
        newest = self._known.get(subject)
        if newest is not None and sequence < newest.sequence and content != newest.content:
            raise SignatureRefused(
                f"it has sequence {sequence}, and one with {newest.sequence} was accepted before: somebody sent an "
                "old announcement again"
            )

    def holds(self, subject: str, content: str) -> bool:
        """Return whether the newest accepted announcement about this subject said this."""
        newest = self._known.get(subject)
        return newest is not None and newest.content == content

    def record(self, subject: str, sequence: int, content: str) -> None:
        """Remember this announcement, on disk before returning. A disk that fails is logged, and the process goes on
        with what it remembers itself."""
        self._merge()
        newest = self._known.get(subject)
        if newest is not None and sequence <= newest.sequence:
            return
        self._known[subject] = _Accepted(sequence=sequence, content=content)
        try:
            with FileLock(self._lock, timeout=LOCK_TIMEOUT_S):
                self._merge()
                self._write()
        except (OSError, Timeout) as exc:
            logger.error("accepted announcements are not remembered beyond this process: %s: %s", self._path, exc)

    @property
    def _lock(self) -> Path:
        return self._path.with_name(f".{self._path.name}.lock")

    def _merge(self) -> None:
        """Take in what other processes accepted."""
        try:
            others = self._read()
        except (OSError, ValidationError) as exc:
            logger.error("accepted announcements of other processes cannot be read: %s: %s", self._path, exc)
            return
        for subject, theirs in others.items():
            ours = self._known.get(subject)
            if ours is None or ours.sequence < theirs.sequence:
                self._known[subject] = theirs

    def _read(self) -> dict[str, _Accepted]:
        try:
            return _FILE.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return {}

    def _write(self) -> None:
        files.write_text(self._path, _FILE.dump_json(self._known, indent=2).decode())
