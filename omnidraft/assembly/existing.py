"""Logs and registries for commands that only read or order: what is not there is refused, where services would create
it."""

from omnidraft.assembly.logs import control_writer, has_registry, log_path, log_reader, registry, topic_names
from omnidraft.config import Settings, masked
from omnidraft.errors import RegistryError, RequestError
from omnidraft.ports import LogReader, LogWriter, Registry

_ADVICE = "the first service that starts makes it; run this where the services run, or name --config"


def existing_registry(settings: Settings) -> Registry:
    """Return the registry without creating a local store. Raises RegistryError when there is none."""
    if not has_registry(settings):
        raise RegistryError(f"there is no registry at {masked(settings.registry.url)} yet: {_ADVICE}")
    return registry(settings)


def existing_log_reader(settings: Settings, topic: str) -> LogReader:
    """Return a reader of this topic without creating it or a local log.

    Raises:
        RequestError: there is no such topic.
        BusError: the log cannot be reached.
    """
    if topic not in _topic_names(settings):
        raise RequestError(f"there is no topic {topic} at {settings.log.url} yet: {_ADVICE}")
    return log_reader(settings, topic)


def existing_control_writer(settings: Settings) -> LogWriter:
    """Return a writer of the control topic for orders, which nobody would follow where no service has begun a log.

    Raises:
        RequestError: there is no log, or none of the fleet's topics is in it.
        BusError: the log cannot be reached.
    """
    if not _topic_names(settings):
        raise RequestError(f"there is no log at {settings.log.url} yet: {_ADVICE}")
    return control_writer(settings)


def _topic_names(settings: Settings) -> set[str]:
    """Return those of the fleet's topics that exist, without creating a local log. Raises BusError."""
    path = log_path(settings)
    return set() if path is not None and not path.exists() else topic_names(settings)
