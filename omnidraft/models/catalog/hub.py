"""Models from the model hub; no other file connects to it."""

import contextlib
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.errors import ModelDownloadError, ModelUnknown

if TYPE_CHECKING:
    from huggingface_hub import HfApi

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]  # never pickles


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


def fetch_repository(hub_id: str, folder: Path) -> str:
    """Put the repository's weights, configuration and tokenizer into `folder`; returns the revision.

    Files that are there already are not fetched again.

    Raises:
        ModelUnknown: the hub has no such repository.
        ModelDownloadError: the hub cannot be reached, or asks to accept terms or log in first.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        with _translate_gated(hub_id):
            revision = HfApi().model_info(hub_id).sha
            snapshot_download(hub_id, revision=revision, local_dir=folder, allow_patterns=FILES)
    except (RepositoryNotFoundError, HFValidationError) as exc:
        raise ModelUnknown(f"the hub has no repository {hub_id!r}") from exc
    except (HTTPError, OSError) as exc:
        raise ModelDownloadError(f"{hub_id}: the hub cannot be reached: {_first_line(exc)}") from exc
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return str(revision)


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
