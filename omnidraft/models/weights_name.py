"""What tells the weights of a model apart from others that go by the same name."""

import hashlib
import json
import logging
import re
from pathlib import Path

from omnidraft.errors import ModelError
from omnidraft.files import file_states, replace_file

SHORT = 12
"""The digits of a digest that are enough in a name."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.gguf)", re.IGNORECASE)
logger = logging.getLogger(__name__)


def weights_digest(source: Path, cache: Path) -> str:
    """Return a SHA-256 of a model folder's config.json and *.safetensors, or of a GGUF file with all its parts.

    Args:
        cache: see file_sha256.

    Raises:
        ModelError: the model cannot be read.
    """
    files = gguf_parts(source) if source.is_file() else [source / "config.json", *sorted(source.glob("*.safetensors"))]
    digests = [bytes.fromhex(file_sha256(file, cache)) for file in files]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def file_sha256(file: Path, cache: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    To read gigabytes takes seconds, so it is kept for the next time, for as long as the file's name, size and times
    stay what they are, that of its last change of any kind among them, which no copying tool sets.

    Args:
        cache: the folder for digests.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        state = json.dumps([str(file.resolve()), *file_states([file]), file.stat().st_ctime_ns])
        kept = cache / f"{hashlib.sha256(state.encode()).hexdigest()[:24]}.sha256"
        return _kept(kept) or _made(file, kept)
    except OSError as exc:
        raise ModelError(f"cannot read {exc.filename}: {exc.strerror}") from exc


def is_gguf(path: Path) -> bool:
    """Return whether this is a file that is called a GGUF file."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def gguf_parts(file: Path) -> list[Path]:
    """Return the files of the model that a GGUF file belongs to, the first part first. They need not be there."""
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    stem, count, suffix = part.groups()
    return [file.with_name(f"{stem}-{number:05d}-of-{count}{suffix}") for number in range(1, int(count) + 1)]


def _kept(path: Path) -> str | None:
    try:
        found = path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return found if _SHA256.fullmatch(found) else None


def _made(file: Path, kept: Path) -> str:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    try:
        replace_file(kept, digest.encode())
    except OSError as exc:
        logger.warning("the next start has to read all of %s for its digest again: %s", file, exc)
    return digest
