"""Models from the model hub; no other file connects to it."""

import fnmatch
import logging
import queue
import shutil
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from omnidraft.errors import ModelCorrupt, ModelDownloadError, ModelUnknown
from omnidraft.files import sha256_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo
    from huggingface_hub.hf_api import RepoSibling

WEIGHTS = "*.safetensors"
FILES = ["*.json", WEIGHTS, "*.jinja", "*.txt", "tokenizer.model"]  # never pickles
NOT_FETCHED = ["consolidated*.safetensors"]
"""The same weights once more, in the form of their authors (Mistral's)."""
MODEL_PARTS = ("config.json", WEIGHTS)
"""What has to be in a folder that a model is loaded from."""
WEIGHTS_SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ckpt"}
NAMED_FILES = 3
logger = logging.getLogger(__name__)


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


def fetch_repository(hub_id: str, folder: Path, *, with_weights: bool, api: "HfApi | None" = None) -> str:
    """Put those of the repository's weights, configuration and tokenizer that it has into `folder`, after their sizes
    and digests were told; return its revision. Files that are there already are not fetched again.

    Args:
        with_weights: False leaves the weights where they are, as a tokenizer needs none.

    Raises:
        ModelUnknown: the hub has no such repository, or it holds no model.
        ModelDownloadError: the hub cannot be reached, or asks to accept terms or log in first.
        ModelCorrupt: a file is not the one that the hub names.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    api = api or HfApi()
    chosen: Any = {"allow_patterns": FILES, "ignore_patterns": NOT_FETCHED if with_weights else [WEIGHTS]}
    try:
        info = api.model_info(hub_id, files_metadata=True)
        files = {each.rfilename: each for each in info.siblings or ()}
        if with_weights:
            require_model(hub_id, files)
        fetched = [files[name] for name in filter_repo_objects(files, **chosen)]
        _tell(hub_id, info, fetched)
        api.snapshot_download(hub_id, revision=info.sha, local_dir=folder, **chosen)
    except GatedRepoError as exc:  # one of those not found for the hub's client
        raise ModelDownloadError(f"{hub_id} is gated: accept its terms on its page, then `hf auth login`") from exc
    except (RepositoryNotFoundError, HFValidationError) as exc:
        raise ModelUnknown(f"the hub has no repository {hub_id!r}") from exc
    except (HTTPError, OSError) as exc:
        raise ModelDownloadError(
            f"{hub_id}: the hub cannot be reached: {(str(exc) or type(exc).__name__).splitlines()[0]}"
        ) from exc
    _require_digests(hub_id, folder, fetched)
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return str(info.sha)


def _tell(hub_id: str, info: "ModelInfo", files: Sequence["RepoSibling"]) -> None:
    from rich.filesize import decimal

    total = decimal(sum(each.size or 0 for each in files))
    logger.warning("fetching %s from the hub, revision %s: %d files, %s", hub_id, info.sha, len(files), total)
    for each in files:
        if each.lfs is not None:
            logger.warning("%s: %s, sha256 %s", each.rfilename, decimal(each.lfs.size), each.lfs.sha256)


def _require_digests(hub_id: str, folder: Path, files: Sequence["RepoSibling"]) -> None:
    for each in files:
        if each.lfs is not None and (sha256 := sha256_of(folder / each.rfilename)) != each.lfs.sha256:
            (folder / each.rfilename).unlink()
            named = f"the hub names {each.lfs.sha256}; pull again"
            raise ModelCorrupt(f"{hub_id}: sha256 of {each.rfilename} is {sha256}, {named}")


def absent_parts(names: Iterable[str]) -> list[str]:
    """Return those of MODEL_PARTS that no file at the top of a folder or repository is."""
    top = [name for name in names if "/" not in name]
    return [pattern for pattern in MODEL_PARTS if not fnmatch.filter(top, pattern)]


def require_model(hub_id: str, names: Collection[str]) -> None:
    """Raise ModelUnknown for a repository without the parts of a model, naming the weights that it has instead."""
    if not (absent := absent_parts(names)):
        return
    weights = [name for name in names if PurePath(name).suffix in WEIGHTS_SUFFIXES]
    more = f" and {len(weights) - NAMED_FILES} more" if len(weights) > NAMED_FILES else ""
    instead = f"; it has {', '.join(weights[:NAMED_FILES])}{more}" if weights else ""
    hint = "; download a GGUF file and give its path" if any(name.endswith(".gguf") for name in weights) else ""
    raise ModelUnknown(f"{hub_id} holds no model that can be loaded: no {', no '.join(absent)}{instead}{hint}")


def _may_read(api: "HfApi", hub_id: str) -> bool:
    from httpx2 import HTTPError

    try:
        api.auth_check(hub_id)
    except (HTTPError, OSError):
        return False
    return True
