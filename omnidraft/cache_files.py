"""Small files of the user's cache, which no reader finds half written."""

import os
import threading
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file aside, in its folder, which is made if it is missing, and rename it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
