"""What tells the weights of a model apart from others that go by the same name."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from omnidraft.cache_files import file_states, replace_file
from omnidraft.errors import ModelError

_LENGTH = 12
logger = logging.getLogger(__name__)


def weights_digest(source: Path, cache: Path) -> str:
    """Return the first digits of a SHA-256 of a model folder's config.json and *.safetensors, or of a GGUF file.

    To read gigabytes takes seconds, so the digest is kept for the next start, for as long as names, sizes and times of
    the files stay what they are.

    Args:
        cache: the folder for digests.

    Raises:
        ModelError: the model cannot be read.
    """
    files = [source] if source.is_file() else [source / "config.json", *sorted(source.glob("*.safetensors"))]
    try:
        kept = cache / f"{_state(source, files)}.txt"
        return _kept(kept) or _made(files, kept)
    except OSError as exc:
        raise ModelError(f"cannot read {exc.filename}: {exc.strerror}") from exc


def _state(source: Path, files: Sequence[Path]) -> str:
    facts = [str(source.resolve()), *file_states(files)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _kept(path: Path) -> str | None:
    try:
        found = path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return found if len(found) == _LENGTH else None


def _made(files: Sequence[Path], kept: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    name = digest.hexdigest()[:_LENGTH]
    try:
        replace_file(kept, name.encode())
    except OSError as exc:
        logger.warning("the next start has to read all of %s for its digest again: %s", files[-1].parent, exc)
    return name
