"""Logs and registries for commands that only read: what is not there is refused, where services would create it."""

from omnidraft.config import Settings, masked
from omnidraft.errors import RegistryError, RequestError
from omnidraft.ports import LogReader, Registry
from omnidraft.wiring.logs import has_registry, log_path, log_reader, registry, topic_names

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
    path = log_path(settings)
    if (path is not None and not path.exists()) or topic not in topic_names(settings):
        raise RequestError(f"there is no topic {topic} at {settings.log.url} yet: {_ADVICE}")
    return log_reader(settings, topic)
