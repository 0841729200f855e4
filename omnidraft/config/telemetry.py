"""Settings of telemetry: Prometheus metrics and OpenTelemetry traces."""

from pydantic import Field, field_validator

from omnidraft.config.log_registry import Section


class MetricsSettings(Section):
    """The metrics endpoints of distiller and controller. The worker answers `/metrics` on `worker.port`."""

    enabled: bool = True
    host: str = "127.0.0.1"
    """Use 0.0.0.0 inside a container. The endpoint has no authentication."""
    distiller_port: int = Field(8001, ge=0, le=65535)
    """One port for the actors of all targets; 0 takes a free one, which the log names. If the port is taken, the
    service runs without it and logs that."""
    controller_port: int = Field(8002, ge=0, le=65535)


class TracingSettings(Section):
    """OpenTelemetry spans of requests, passes, trace records, learning steps and snapshots. Needs `omnidraft[otel]`."""

    endpoint: str | None = None
    """A collector that takes OTLP over HTTP, such as http://collector:4318; None: no tracing.
    OTEL_EXPORTER_OTLP_ENDPOINT sets it; its headers and certificates come from OTEL_EXPORTER_OTLP_* too."""
    passes: bool = True
    """Whether every pass of the target is a span of its own."""
    sample_ratio: float | None = Field(None, ge=0, le=1)
    """The share of traces sampled; a client's sampling decision wins. None: all, or as OTEL_TRACES_SAMPLER says."""
    queue_spans: int = Field(8192, ge=512)
    """Spans that may wait for the collector; a full queue drops the oldest."""
    timeout_s: float = Field(5.0, gt=0)
    """The timeout of one batch, and of the last batches when the process stops."""

    @field_validator("endpoint")
    @classmethod
    def _is_an_address(cls, endpoint: str | None) -> str | None:
        if endpoint is None or endpoint.startswith(("http://", "https://")):
            return endpoint
        raise ValueError("not a collector: use http://host:4318 or https://host:4318")
