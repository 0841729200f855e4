"""The note that a log lost messages that were read."""

import logging
from pathlib import Path

from omnidraft import files

logger = logging.getLogger(__name__)


class TruncationMark:
    """A file that tells the next process that the log lost messages that were read: others may have their offsets by
    then, and the log may end beyond all that was learned. The folder of `path` must outlive the process."""

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
        if self._path is None:
            return
        try:
            if error is None:
                self._path.unlink(missing_ok=True)
            else:
                files.make_folder(self._path.parent)
                files.write_text(self._path, error)
        except OSError as exc:
            logger.warning("%s cannot be written, so the next process will not know of this: %s", self._path, exc)
