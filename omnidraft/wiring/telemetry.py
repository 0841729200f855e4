"""The tracing of a process."""

from omnidraft.config import Settings
from omnidraft.errors import ConfigError
from omnidraft.ports import Metrics, NoopTracing, Tracing


def tracing(settings: Settings, role: str, metrics: Metrics) -> Tracing:
    """Return the tracing of a process with this role: worker, distiller or controller.

    Raises:
        ConfigError: `tracing.endpoint` is set and OpenTelemetry is not installed.
    """
    if settings.tracing.endpoint is None:
        return NoopTracing()
    try:
        from omnidraft.telemetry.tracing import OtelTracing
    except ImportError as exc:
        raise ConfigError(f"tracing.endpoint needs `pip install 'omnidraft[otel]'`: {exc}") from exc
    return OtelTracing(settings.tracing, f"omnidraft-{role}", metrics)
