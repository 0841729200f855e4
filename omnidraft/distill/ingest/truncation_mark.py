"""The truncation mark: a file that tells the next process that the log lost messages that were read.

That process cannot see it by itself: others may have their offsets by then, and the log may end beyond all that was
learned.
"""

import logging
from pathlib import Path

from omnidraft import files

logger = logging.getLogger(__name__)


class TruncationMark:
    """The mark of one distiller; the folder of `path` must outlive its process."""

    def __init__(self, path: Path | None = None) -> None:
        """Go on with the mark of the process before. Without a path no other process learns of it."""
        self._path = path
        self.error = path.read_text(errors="replace") if path is not None and path.exists() else None
        """The error by which the log told of the loss; None: no loss is known, or an operator said where to go on."""

    def set(self, error: str | None) -> None:
        """Note the error, or that it is settled; on disk when this returns. A disk that refuses it stops nothing."""
        if error == self.error:
            return
        self.error = error
        try:
            self._save()
        except OSError as exc:
            logger.warning("%s cannot be written, so the next process will not know of this: %s", self._path, exc)

    def _save(self) -> None:
        if self._path is None:
            return
        if self.error is None:
            self._path.unlink(missing_ok=True)
            return
        files.make_folder(self._path.parent)
        files.write_text(self._path, self.error)
