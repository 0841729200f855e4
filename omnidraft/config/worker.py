"""Settings of the decoding worker's HTTP side: where it listens, who may ask, how much, and how it stops."""

from pydantic import Field, SecretStr, field_validator

from omnidraft.config.outside import Section

MIN_KEY_LETTERS = 16


class ApiKey(Section):
    """Lets its holder ask, as `Authorization: Bearer KEY`."""

    key: SecretStr
    """Printable ASCII without spaces; `omnidraft traces new-key` makes one."""
    tenant: str | None = Field(None, min_length=1)
    """Whose requests these are, whatever they say in `user`. None: what they say, else `worker.tenant`."""

    @field_validator("key")
    @classmethod
    def _can_be_sent(cls, key: SecretStr) -> SecretStr:
        text = key.get_secret_value()
        if len(text) < MIN_KEY_LETTERS or not all("!" <= letter <= "~" for letter in text):
            raise ValueError(f"a key has {MIN_KEY_LETTERS} printable ASCII letters or more, without spaces")
        return key


class WorkerSettings(Section):
    """The decoding worker's HTTP side."""

    host: str = "127.0.0.1"
    """0.0.0.0 listens to other machines too; set `api_keys` first."""
    port: int = Field(8000, ge=0, le=65535)
    """0 takes a free one, which the log names."""
    api_keys: tuple[ApiKey, ...] = ()
    """Who may use /v1; empty: everybody. Give them as OMNIDRAFT_WORKER__API_KEYS='[{"key": "...", "tenant": "..."}]'
    rather than in a file."""
    max_queue: int = Field(64, ge=1)
    """Requests that may wait for the target; more get 429. Turned up, clients wait longer instead."""
    max_body_bytes: int = Field(1_000_000, ge=1)
    max_new_tokens: int = Field(2048, ge=1)
    """What `max_tokens` may be."""
    max_choices: int = Field(16, ge=1)
    """Texts of one request: `n` times its prompts. They are decoded one after another."""
    drain_timeout_s: float = Field(15.0, ge=0)
    """How long accepted requests may go on after SIGTERM; then they end with an error. What stops the process by force
    has to wait longer than this and `recorder.drain_timeout_s` together."""
    poll_s: float = Field(2.0, gt=0)
    """How often the registry is asked for the champion, in case an announcement was missed."""
    tenant: str = "default"
    """Whose requests are that say nothing about it."""
    snapshot: str | None = None
    """Serve `models.target` with this folder, version or alias for good. None: the base drafter, then the champion."""

    @field_validator("api_keys")
    @classmethod
    def _are_distinct(cls, keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        if len({each.key.get_secret_value() for each in keys}) < len(keys):
            raise ValueError("two of worker.api_keys are the same key")
        return keys
