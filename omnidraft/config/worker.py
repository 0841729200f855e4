"""Settings of the two processes that draft: the decoding worker's HTTP side, and the proposer inside vLLM."""

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from omnidraft.config.learning import GROUP_KEYS
from omnidraft.config.services import Section

MIN_KEY_CHARS = 16


def _not_of_group(tenant: str) -> str:
    if tenant.startswith(GROUP_KEYS):
        raise ValueError(f"names that begin with {GROUP_KEYS!r} are those of groups' keys")
    return tenant


TenantName = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_not_of_group)]


HostName = Annotated[str, Field(pattern=r"^(\*|[^\s:/*]+)$"), AfterValidator(lambda name: name.lower().rstrip("."))]


class ApiKey(Section):
    """A key that clients send as `Authorization: Bearer KEY`."""

    key: SecretStr
    """Printable ASCII without spaces; `omnidraft traces new-key` makes one."""
    tenant: TenantName | None = None
    """The tenant of its requests, whatever their `user` says; no other key may name it. None: their `user`, unless
    another key has that tenant, else `worker.tenant`."""

    @field_validator("key")
    @classmethod
    def _can_be_sent(cls, key: SecretStr) -> SecretStr:
        return _sendable(key)


def _sendable(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if len(text) < MIN_KEY_CHARS or not all("!" <= char <= "~" for char in text):
        raise ValueError(f"a key has {MIN_KEY_CHARS} printable ASCII letters or more, without spaces")
    return key


class WorkerSettings(Section):
    """The decoding worker's HTTP side."""

    host: str = "127.0.0.1"
    """0.0.0.0 accepts connections from other machines; set `api_keys` first."""
    port: int = Field(8000, ge=0, le=65535)
    """0 takes a free port, which the log names."""
    allowed_hosts: tuple[HostName, ...] = ()
    """Names, besides localhost, `host` and any address, that requests may have as their Host header; others get 421,
    here and where the distiller and the controller answer /metrics. Else a web page could use this machine through a
    name of its own. "*" allows any name: behind a proxy that checks them."""
    api_keys: tuple[ApiKey, ...] = ()
    """The keys that allow /v1; empty: no authentication. Give them as OMNIDRAFT_WORKER__API_KEYS='[{"key": "...",
    "tenant": "..."}]' rather than in a file."""
    metrics_key: SecretStr | None = None
    """The key that /metrics asks for, as `Authorization: Bearer KEY`; none of `api_keys`. None: everybody who reaches
    the port may read how much all tenants send together. `omnidraft status` and Prometheus need it too."""
    page: bool = True
    """Whether `/` is a page on which to ask and watch. With `api_keys` it asks for a key."""
    max_queue: int = Field(64, ge=1)
    """Requests that may wait for the target, and half of those of one client whose prompts may wait to be tokenized;
    more get 429. Higher makes clients wait longer instead."""
    max_connections: int = Field(512, ge=1)
    """Connections at most; more get 503 and are closed. Each takes a file descriptor and up to a third of a
    megabyte."""
    max_connections_per_address: int = Field(256, ge=1)
    """Connections from one address at most; more get 429. Set it to `max_connections` behind a proxy, whose address all
    clients share."""
    max_body_bytes: int = Field(1_000_000, ge=1)
    """Larger bodies get 413."""
    idle_timeout_s: int = Field(5, ge=1)
    """The time for which a connection stays open without a request; behind a proxy, longer than the proxy's own."""
    max_new_tokens: int | None = Field(None, ge=1)
    """The most tokens of an answer, whatever the request says; None: as many as the context holds."""
    drain_timeout_s: float = Field(15.0, ge=0)
    """The time accepted requests have to finish after SIGTERM; then they end with an error. Whatever kills the process
    has to wait 10 seconds longer, for the log to take the last records."""
    poll_s: float = Field(2.0, gt=0)
    """The interval at which the registry is read for the champion, in case an announcement was missed."""
    tenant: TenantName = "default"
    """The tenant of requests that name none."""
    snapshot: str | None = None
    """Serve `models.target` with this folder, version or alias permanently. None: the base drafter, then the
    champion."""

    @field_validator("api_keys")
    @classmethod
    def _are_distinct(cls, keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        if len({each.key.get_secret_value() for each in keys}) < len(keys):
            raise ValueError("two of worker.api_keys are the same key")
        return keys

    @field_validator("metrics_key")
    @classmethod
    def _can_be_sent(cls, key: SecretStr | None) -> SecretStr | None:
        return None if key is None else _sendable(key)

    @model_validator(mode="after")
    def _keeps_keys_and_tenants_apart(self) -> "WorkerSettings":
        if self.metrics_key is not None and any(each.key == self.metrics_key for each in self.api_keys):
            raise ValueError("worker.metrics_key is one of worker.api_keys, so a tenant could read it")
        has_free_key = any(each.tenant is None for each in self.api_keys)
        if has_free_key and any(each.tenant == self.tenant for each in self.api_keys):
            raise ValueError(
                f"worker.tenant is {self.tenant!r}, which a key of worker.api_keys has, and another key without a "
                "tenant would be that tenant too; set worker.tenant to a name of its own"
            )
        return self
