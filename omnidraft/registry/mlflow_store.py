"""Open an MLflow store without its log output and translate its errors; the registry is in mlflow_registry.py.

A new SQLite store is migrated under a file lock, because processes that open it together crash in the migration.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from filelock import FileLock

from omnidraft.config import masked
from omnidraft.errors import OmnidraftError, RegistryError, SnapshotNotFound, StoreLibraryMissing
from omnidraft.threads import within

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 30.0
"""How long a server has to answer the first reads; one that has just started takes a while."""
READ_TIMEOUT_S = 5.0
"""How long a server has to answer a read, retries included."""
PAGE_SIZE = 100
"""Versions in one answer of the store; each has thirty tags."""
SQLITE = "sqlite:///"
MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",  # it would sleep for as long as a proxy asks for
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",  # a server may need long to store an upload
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Environment variables that are set before mlflow is imported, unless they are set already."""


def open_client(url: str) -> "MlflowClient":
    """Return a client of a store that exists and answers.

    Args:
        url: sqlite:///path or http(s)://host.

    Raises:
        RegistryError: it does not answer within seconds, or cannot be opened.
    """
    for name, value in MLFLOW_DEFAULTS.items():
        os.environ.setdefault(name, value)
    check_reachable(url)
    with translate_errors(url, "opening"):
        return _open_sqlite(database_of(url)) if url.startswith(SQLITE) else _open(url)


def check_reachable(url: str) -> None:
    """Connect to a server, without MLflow, which takes seconds to import; make a local store's folder.

    Raises:
        RegistryError: nothing answers within READ_TIMEOUT_S; there can be no such folder; the file cannot be written.
    """
    try:
        if url.startswith(SQLITE):
            _check_database(database_of(url))
        elif url.startswith(("http://", "https://")):
            parts = urlsplit(url)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            socket.create_connection((parts.hostname or "", port), timeout=READ_TIMEOUT_S).close()
    except OSError as exc:
        raise RegistryError(masked(f"opening at {url}: {exc}; {_advice(url)}")) from exc


def database_of(url: str) -> Path:
    """Return the file of a sqlite:/// URL."""
    return Path(url.removeprefix(SQLITE)).absolute()


def local_folder(artifact_uri: str) -> Path | None:
    """Return the folder of the artifacts, None when this process reaches them through MLflow only."""
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    return Path(local_file_uri_to_path(artifact_uri)) if is_local_uri(artifact_uri) else None


@contextmanager
def translate_errors(url: str, action: str) -> Iterator[None]:
    """Translate the errors of MLflow, and of the libraries below it, into ours."""
    try:
        yield
    except OSError as exc:  # the errors of requests are OSErrors too
        raise RegistryError(masked(f"{action} at {url}: {exc}; {_advice(url)}")) from exc
    except _store_errors() as exc:
        if getattr(exc, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
            raise SnapshotNotFound(masked(f"{action} at {url}: {exc}")) from exc
        raise RegistryError(masked(f"{action} at {url}: {str(exc).splitlines()[0]}; {_advice(url)}")) from exc


@contextmanager
def translate_artifact_errors(url: str) -> Iterator[None]:
    """Translate what only an artifact store raises: MLflow passes on the errors of boto3 and its like, which may be any
    Exception. All others are left to `translate_errors`."""
    try:
        yield
    except (OmnidraftError, OSError):
        raise
    except _store_errors():
        raise
    except ImportError as exc:
        advice = "install it wherever snapshots are published or fetched: boto3 for s3://, see docs/deploy.md"
        raise StoreLibraryMissing(masked(f"the artifact store of {url} needs a library: {exc}; {advice}")) from exc
    except Exception as exc:  # artifact stores raise errors of their own libraries
        advice = "check that this process reaches it and has its credentials, then try again"
        raise RegistryError(masked(f"the artifact store of {url}: {type(exc).__name__}: {exc}; {advice}")) from exc


@contextmanager
def undo_on_failure(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` when the block fails, and raise the block's error, also when `undo` fails too."""
    try:
        yield
    except BaseException:
        try:
            undo()
        except Exception as exc:  # artifact stores raise errors of their own libraries
            logger.warning("what a failed publication left in MLflow could not be deleted: %s", masked(str(exc)))
        raise


def _check_database(database: Path) -> None:
    """Raises OSError. The file is not even opened: closing it would drop the locks that this process has on it."""
    database.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(database if database.exists() else database.parent, os.W_OK):
        raise PermissionError("it cannot be written")


def _open_sqlite(database: Path) -> "MlflowClient":
    with FileLock(database.with_name(f".{database.name}.lock")):
        return _open(f"{SQLITE}{database}")


def _open(url: str) -> "MlflowClient":
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)  # mlflow sets both to INFO when it is imported
    logging.getLogger("mlflow").setLevel(os.environ["MLFLOW_LOGGING_LEVEL"].upper())
    client = MlflowClient(tracking_uri=url, registry_uri=url)
    is_server = not url.startswith(SQLITE)
    first = _in_time(client, OPEN_TIMEOUT_S) if is_server else client
    first.search_experiments(max_results=1)
    first.search_registered_models(max_results=1)
    return _in_time(client, READ_TIMEOUT_S) if is_server else client


def _in_time(client: "MlflowClient", timeout_s: float) -> "MlflowClient":
    """Return the client with reads that fail after this time. MLflow has one timeout for all that it asks a server for,
    and an upload needs a longer one."""
    return cast("MlflowClient", _ReadsInTime(client, timeout_s))


class _ReadsInTime:
    def __init__(self, client: "MlflowClient", timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not name.startswith(("get_", "search_")):
            return method
        return lambda *args, **options: within(self._timeout_s, partial(method, *args, **options))


def _store_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of MLflow and its libraries; a proxy's page instead of JSON is an error of the parser."""
    from json import JSONDecodeError

    from google.protobuf.json_format import ParseError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, SQLAlchemyError, ParseError, JSONDecodeError)


def _advice(url: str) -> str:
    if url.startswith(SQLITE):
        return "check that the folder is writable and the file an MLflow database of this MLflow version"
    return "check that the MLflow server runs and that MLFLOW_TRACKING_URI names it, then try again"


def experiment_id(client: "MlflowClient", url: str, name: str, artifacts: str | None) -> str:
    """Return the id of the experiment of this name, which is created if it does not exist.

    Args:
        artifacts: folder or URI of its files; None: beside a local database, or as the server decides.
    """
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return experiment.experiment_id
    try:
        return client.create_experiment(name, artifact_location=_artifact_location(url, name, artifacts))
    except MlflowException as exc:
        if exc.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return experiment_id(client, url, name, artifacts)


def create_model(client: "MlflowClient", name: str, description: str) -> None:
    """Create the registered model of this name, unless there is one."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description=description)
    except MlflowException as exc:
        if exc.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def find_model(client: "MlflowClient", url: str, name: str) -> "RegisteredModel | None":
    """Return the registered model of this name, None before the first publication."""
    with suppress(SnapshotNotFound), translate_errors(url, f"reading aliases of {name}"):
        return client.get_registered_model(name)
    return None


def newest_first(client: "MlflowClient", name: str) -> "Iterator[ModelVersion]":
    """Yield the versions of a registered model, from the newest on, a page at a time."""
    order, token, last = ["version_number DESC"], None, inf
    while True:
        page = client.search_model_versions(f"name='{name}'", PAGE_SIZE, order, page_token=token)
        for each in page:
            if int(each.version) < last:  # else a version made meanwhile moved it to this page
                yield each
        last = min([last, *(int(each.version) for each in page)])
        token = page.token
        if not token:
            return


def versions_of_run(client: "MlflowClient", name: str, run_id: str) -> "list[ModelVersion]":
    """Return the versions of a registered model that this run made."""
    return [each for each in client.search_model_versions(f"run_id='{run_id}'") if each.name == name]


def _artifact_location(url: str, name: str, artifacts: str | None) -> str | None:
    """Return the URI of the experiment's files, None when the server decides."""
    if artifacts is not None and "://" in artifacts:
        return f"{artifacts.rstrip('/')}/{name}"
    if artifacts is not None:
        return (Path(artifacts).absolute() / name).as_uri()
    if url.startswith(SQLITE):
        return (database_of(url).parent / "artifacts" / name).as_uri()
    return None
