"""Settings of the external services: log, registry, Prometheus metrics, OpenTelemetry, with credentials and keys."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_serializer, model_validator

from omnidraft.config.secrets import EncryptionKey, PrivateKeyText, PublicKeyText, masked


def like(pattern: str, message: str) -> AfterValidator:
    """Return what refuses values that do not match, with this message."""

    def matching(value: Any) -> Any:
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if not re.fullmatch(pattern, text):
            raise ValueError(message)
        return value

    return AfterValidator(matching)


def _with_a_port(url: str) -> str:
    _ = urlsplit(url).port  # raises ValueError for one that is no number up to 65535
    return url


LogUrl = Annotated[
    str,
    like(
        r"sqlite:///.+|kafka://[^/:,@]+:\d+(,[^/:,@]+:\d+)*",
        "not a log: use sqlite:///path or kafka://host:port[,host:port]",
    ),
]
KeyStoreUrl = Annotated[
    SecretStr,
    like(
        r"sqlite:///.+|postgresql(\+\w+)?://[^/]+/.+",
        "not a key store: use sqlite:///path or postgresql://user@host/database",
    ),
]
RegistryUrl = Annotated[
    str,
    like(
        r"(sqlite|directory):///.+|(https?|(postgresql|mysql)(\+\w+)?)://[^/]+.*",
        "not a registry: use sqlite:///path, http://host:port, postgresql://... or directory:///path",
    ),
    AfterValidator(_with_a_port),
]
TokenUrl = Annotated[
    str, like(r"https?://[^/@]+/.*|file:///.+", "no place of tokens: use https://host/path or file:///path")
]
CollectorUrl = Annotated[str, like(r"https?://.*", "not a collector: use http://host:4318 or https://host:4318")]


class Section(BaseModel):
    """A section of the settings; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class KafkaSettings(Section):
    """Authentication of our Kafka clients and of the broker. Secrets never appear in logs or reports."""

    security: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    """Encryption (`ssl`) and passwords (`sasl`), as the broker's listener has them."""
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = "SCRAM-SHA-512"
    username: str | None = None
    password: SecretStr | None = None
    """Give it as OMNIDRAFT_LOG__KAFKA__PASSWORD rather than in a file."""
    token_url: TokenUrl | None = None
    """With OAUTHBEARER: the endpoint that gives tokens for `username` and `password`, the client's id and secret. With
    file:///path: a file with a token, which something else renews."""
    token_scope: str | None = None
    """The scope of tokens, for endpoints that want one, as Entra's do."""
    token_extensions: dict[str, str] = Field(default_factory=dict)
    """What a broker wants beside a token, as Confluent's `logicalCluster` and `identityPoolId`."""
    ca_file: Path | None = None
    """The certificate authority of the broker, as PEM; None trusts the system's authorities."""
    cert_file: Path | None = None
    """The client certificate, for brokers that require one; `key_file` belongs to it."""
    key_file: Path | None = None
    key_password: SecretStr | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> "KafkaSettings":
        is_sasl, has_token_url = self.security.startswith("sasl"), self.token_url is not None
        if has_token_url != (is_sasl and self.mechanism == "OAUTHBEARER"):
            raise ValueError("log.kafka.token_url is for log.kafka.mechanism = 'OAUTHBEARER', which needs it")
        is_named = self.username is not None and self.password is not None
        if is_sasl and not is_named and not (self.token_url or "").startswith("file:"):
            raise ValueError(f"log.kafka.security = '{self.security}' needs log.kafka.username and log.kafka.password")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("log.kafka.cert_file and log.kafka.key_file belong together")
        if self.username is not None and not is_sasl:
            raise ValueError(
                f"log.kafka.username is not used with log.kafka.security = '{self.security}': take a sasl one"
            )
        if (self.ca_file or self.cert_file) and not self.security.endswith("ssl"):
            raise ValueError(f"certificates are not used with log.kafka.security = '{self.security}': take an ssl one")
        return self


class StoreSettings(Section):
    """A log or registry, by its address."""

    url: str

    @property
    def path(self) -> Path | None:
        """The path in sqlite:///relative/path, sqlite:////absolute/path (the syntax of SQLAlchemy and MLflow) or
        directory:///path; None: a server has it."""
        scheme, _, path = self.url.partition(":///")
        return Path(path) if scheme in ("sqlite", "directory") else None

    @property
    def exists(self) -> bool:
        """Whether it exists, as far as its address tells: a local one does once a service started."""
        return self.path is None or self.path.exists()


class LogSettings(StoreSettings):
    """The log of trace records, dead letters and what holds in the fleet."""

    url: LogUrl = "sqlite:///runs/omnidraft/log.db"
    """sqlite:///path or kafka://host:port[,host:port]."""
    topic_prefix: str = "omnidraft"
    partitions: int = Field(1, ge=1)
    """Partitions of the trace topic when it has to be created."""
    request_timeout_s: float = Field(10.0, gt=0)
    retention_hours: float | None = Field(None, gt=0)
    """The retention of trace records. A learner that is down for longer loses the records it has not read. None: the
    broker's default, unlimited in SQLite. Kafka's topics get it when we create them; SQLite deletes on writing."""
    dead_letters_retention_hours: float | None = Field(None, gt=0)
    """The retention of dead letters."""
    encryption_keys: tuple[EncryptionKey, ...] = ()
    """Master keys: the first one wraps the tenants' keys in `key_store` and any unwraps them, so a new key goes in
    front. Trace records, dead letters and records in snapshots are encrypted, each with its tenant's key; what belongs
    to no tenant, with the master key. Empty: no encryption. Give them as OMNIDRAFT_LOG__ENCRYPTION_KEYS='["..."]';
    `omnidraft traces new-key` makes one."""
    key_store: KeyStoreUrl | None = None
    """The database of the tenants' keys: sqlite:///path or postgresql://user@host/database. None: `keys.db` beside an
    SQLite log. With Kafka there is no default: without it everything is encrypted with the master key, and only
    retention deletes a tenant's records. Give one with a password as OMNIDRAFT_LOG__KEY_STORE, or set PGPASSWORD."""
    kafka: KafkaSettings = KafkaSettings()

    @model_validator(mode="after")
    def _encrypts_with_its_keys(self) -> "LogSettings":
        if self.key_store is not None and not self.encryption_keys:
            raise ValueError("log.key_store is of no use without log.encryption_keys: nothing would be encrypted")
        return self

    @property
    def key_store_url(self) -> str | None:
        """The URL of the key store in use; None: there is none."""
        if not self.encryption_keys:
            return None
        if self.key_store is not None:
            return self.key_store.get_secret_value()
        return None if self.path is None else f"sqlite:///{self.path.parent / 'keys.db'}"

    @property
    def topics(self) -> tuple[str, str, str]:
        return self.traces_topic, self.dead_letters_topic, self.control_topic

    @property
    def traces_topic(self) -> str:
        return f"{self.topic_prefix}.traces.v1"

    @property
    def dead_letters_topic(self) -> str:
        return f"{self.topic_prefix}.dead-letters.v1"

    @property
    def control_topic(self) -> str:
        return f"{self.topic_prefix}.snapshots.v1"


class RegistrySettings(StoreSettings):
    """The registry of snapshot versions."""

    url: RegistryUrl = "sqlite:///runs/omnidraft/mlflow.db"
    """An MLflow tracking URI (sqlite:///path, http://host:5000), or directory:///path without MLflow."""
    artifacts: str | None = None
    """The folder for files of a local MLflow store; None: `artifacts` beside its database."""
    keep_resume: int = Field(2, ge=1)
    """The number of newest snapshots that keep their resume part (optimizer, master weights) and the fleet's memory;
    older ones but the champion lose both."""
    keep_serving: int = Field(20, ge=1)
    """The number of newest snapshots that keep their weights and n-gram cache, at least `keep_resume`; older ones
    without an alias (champion, previous, challenger) lose them, keep their manifest, and cannot serve again. Higher
    needs more of the registry's disk."""
    private_key: PrivateKeyText | None = None
    """Signs what this process publishes: a distiller's snapshots, a controller's or an operator's values of the control
    log. Workers have none here. Give it as OMNIDRAFT_REGISTRY__PRIVATE_KEY; `omnidraft snapshots new-key` makes one."""
    trusted_keys: tuple[PublicKeyText, ...] = ()
    """Public keys with what each may sign, as `distiller:ed25519:...`, `controller:ed25519:...` or
    `operator:ed25519:...`. With any, snapshots and control values without a signature of theirs are refused. Empty:
    nothing is verified."""

    @model_validator(mode="after")
    def _trusts_somebody(self) -> "RegistrySettings":
        if self.private_key is not None and not self.trusted_keys:
            raise ValueError("registry.private_key needs registry.trusted_keys, its own public key among them")
        return self

    @property
    def is_in_mlflow(self) -> bool:
        return not self.url.startswith("directory:")

    @field_serializer("url", "artifacts", when_used="json")
    def _show(self, address: str | None) -> str | None:
        return address and masked(address)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, masked(value) if isinstance(value, str) else value


class MetricsSettings(Section):
    """The metrics endpoints of distiller, controller and vLLM's proposer; that of the worker is on `worker.port`."""

    host: str = "127.0.0.1"
    """Use 0.0.0.0 inside a container. The endpoint has no authentication."""
    distiller_port: int = Field(8001, ge=0, le=65535)
    """One port for the actors of all targets; 0 takes a free one, which the log names. If the port is taken, the
    service runs without it and logs that."""
    controller_port: int = Field(8002, ge=0, le=65535)
    vllm_port: int | None = Field(None, ge=0, le=65535)
    """That of the proposer inside vLLM. None: its metrics appear among vLLM's own where PROMETHEUS_MULTIPROC_DIR is
    set."""


class TracingSettings(Section):
    """OpenTelemetry spans of requests, passes, trace records, learning steps and snapshots. Needs `omnidraft[otel]`."""

    endpoint: CollectorUrl | None = None
    """A collector that takes OTLP over HTTP, such as http://collector:4318; None: no tracing.
    OTEL_EXPORTER_OTLP_ENDPOINT sets it; its headers and certificates come from OTEL_EXPORTER_OTLP_* too."""
