"""What a process reports of its work: trace records, by way of the operator's redactor, and OpenTelemetry spans."""

import logging
from collections.abc import Callable
from importlib import import_module

from omnidraft import extras
from omnidraft.assembly.logs import log_reader, log_writer
from omnidraft.config import Settings
from omnidraft.decode.recording.trace_producer import Redactor, TraceProducer
from omnidraft.errors import ConfigError
from omnidraft.ports import Metrics, NoopTracing, Tracing
from omnidraft.traces.redaction import hash_of_tenant

logger = logging.getLogger(__name__)

_REDACTION = "omnidraft.traces.redaction"


def trace_producer(settings: Settings, metrics: Metrics, tracing: Tracing | None = None) -> TraceProducer | None:
    """Return the producer of one process, or None when `recorder.enabled` is off.

    Raises:
        BusError: the log cannot be reached.
        ConfigError: there is no such redactor.
    """
    if not settings.recorder.enabled:
        return None
    redact, topic = redactor(settings), settings.log.traces_topic
    log_reader(settings, topic).close()
    return TraceProducer(lambda: log_writer(settings, topic), settings.recorder, metrics, redact, tracing)


def redactor(settings: Settings) -> Redactor | None:
    """Return the redactor, or None when records are written unchanged. Raises ConfigError when there is none."""
    path = settings.recorder.redactor
    if path is None:
        return None
    module_name, _, name = path.partition(":")
    try:
        function = getattr(import_module(module_name), name)
    except ImportError as exc:
        raise ConfigError(f"recorder.redactor = {path!r}: {exc}; is it on the Python path?") from exc
    except AttributeError as exc:
        raise ConfigError(f"recorder.redactor = {path!r}: {exc}") from exc
    except Exception as exc:  # not our code: importing it may raise anything
        raise ConfigError(f"recorder.redactor = {path!r}: importing it raised {type(exc).__name__}: {exc}") from exc
    if not callable(function):
        raise ConfigError(f"recorder.redactor = {path!r} is a {type(function).__name__}, not a function")
    made: Redactor = function
    return made


def recorded_as(settings: Settings) -> Callable[[str], str | None]:
    """Return a function from a tenant to its name in the records; to None under a redactor that may change names in a
    way that is not known here: else one tenant could be drafted what was learned from another."""
    path = settings.recorder.redactor
    if path in (None, f"{_REDACTION}:without_prompts"):
        return lambda tenant: tenant
    if path == f"{_REDACTION}:hashed_tenant":
        return hash_of_tenant
    logger.info("recorder.redactor may rename tenants, so this worker drafts nothing that was learned for one of them")
    return lambda tenant: None


def tracing(settings: Settings, role: str, metrics: Metrics) -> Tracing:
    """Return the tracing of a process with this role: worker, distiller or controller.

    Raises:
        ExtraMissing: `tracing.endpoint` is set and OpenTelemetry is not installed.
    """
    if settings.tracing.endpoint is None:
        return NoopTracing()
    extras.require("otel", "tracing.endpoint")
    from omnidraft.telemetry.tracing import OtelTracing

    return OtelTracing(settings.tracing.endpoint, f"omnidraft-{role}", metrics)
