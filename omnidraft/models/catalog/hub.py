"""Models from the model hub; no other file connects to it."""

import contextlib
import queue
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from omnidraft.errors import ModelDownloadError, ModelUnknown

if TYPE_CHECKING:
    from huggingface_hub import HfApi

WEIGHTS = "*.safetensors"
FILES = ["*.json", WEIGHTS, "*.jinja", "*.txt", "tokenizer.model"]  # never pickles
NOT_FETCHED = ["consolidated*.safetensors"]
"""The same weights once more, in the form of their authors (Mistral's)."""
MODEL_PARTS = ("config.json", WEIGHTS)
"""What has to be in a folder that a model is loaded from."""
WEIGHTS_SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ckpt"}
NAMED_FILES = 3


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the hub, as it was fetched."""

    revision: str
    files: tuple[str, ...]
    """The names of all files that it has, of which FILES are fetched."""


def is_reachable(hub_id: str, *, timeout_s: float = 3.0) -> bool:
    """Return whether the hub confirms, within the timeout, that this repository can be read from here.

    One request in a thread of its own, since name resolution has no timeout.
    """
    from huggingface_hub import HfApi  # takes seconds on a slow disk, which must not count

    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_may_read(HfApi(), hub_id)), daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return False


def fetch_repository(hub_id: str, folder: Path, *, with_weights: bool) -> Repository:
    """Put those of the repository's weights, configuration and tokenizer that it has into `folder`.

    Files that are there already are not fetched again.

    Args:
        with_weights: False leaves the weights where they are, as a tokenizer needs none.

    Raises:
        ModelUnknown: the hub has no such repository.
        ModelDownloadError: the hub cannot be reached, or asks to accept terms or log in first.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    ignored = NOT_FETCHED if with_weights else [WEIGHTS]
    try:
        with _translate_gated(hub_id):
            info = HfApi().model_info(hub_id)
            snapshot_download(
                hub_id, revision=info.sha, local_dir=folder, allow_patterns=FILES, ignore_patterns=ignored
            )
    except (RepositoryNotFoundError, HFValidationError) as exc:
        raise ModelUnknown(f"the hub has no repository {hub_id!r}") from exc
    except (HTTPError, OSError) as exc:
        raise ModelDownloadError(f"{hub_id}: the hub cannot be reached: {_first_line(exc)}") from exc
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return Repository(str(info.sha), tuple(each.rfilename for each in info.siblings or ()))


def absent_parts(folder: Path) -> list[str]:
    """Return those of MODEL_PARTS that a folder does not have."""
    return [pattern for pattern in MODEL_PARTS if not any(folder.glob(pattern))]


def no_model_message(hub_id: str, absent: Iterable[str], files: Iterable[str]) -> str:
    """Return the error message for a repository without these parts, with the weights that it has instead."""
    weights = [name for name in files if PurePath(name).suffix in WEIGHTS_SUFFIXES]
    more = f" and {len(weights) - NAMED_FILES} more" if len(weights) > NAMED_FILES else ""
    instead = f"; it has {', '.join(weights[:NAMED_FILES])}{more}" if weights else ""
    hint = "; download a GGUF file and give its path" if any(name.endswith(".gguf") for name in weights) else ""
    return f"{hub_id} holds no model that can be loaded: no {', no '.join(absent)}{instead}{hint}"


@contextlib.contextmanager
def _translate_gated(hub_id: str) -> Iterator[None]:
    """Translate the error of a gated repository, which the hub's client counts among those not found."""
    from huggingface_hub.errors import GatedRepoError

    try:
        yield
    except GatedRepoError as exc:
        raise ModelDownloadError(f"{hub_id} is gated: accept its terms on its page, then `hf auth login`") from exc


def _may_read(api: "HfApi", hub_id: str) -> bool:
    from httpx2 import HTTPError

    try:
        api.auth_check(hub_id)
    except (HTTPError, OSError):
        return False
    return True


def _first_line(exc: Exception) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0]
