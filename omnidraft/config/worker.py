"""Settings of the two processes that draft: the decoding worker's HTTP side, and the proposer inside vLLM."""

from pydantic import Field, SecretStr, field_validator

from omnidraft.config.log_registry import Section

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
    max_connections: int = Field(512, ge=1)
    """Beyond, new ones get 503 and are closed. Each takes a file descriptor and, at worst, a third of a megabyte."""
    max_connections_per_address: int = Field(256, ge=1)
    """Beyond, new ones from that address get 429. Turn it up to `max_connections` where a proxy stands in front, which
    all clients share."""
    max_url_bytes: int = Field(8_192, ge=16)
    """Longer ones get 414. At most `max_header_bytes`, which count it too."""
    max_header_bytes: int = Field(32_768, ge=256)
    """More get 431, before anything else is looked at."""
    max_body_bytes: int = Field(1_000_000, ge=1)
    """More get 413."""
    header_timeout_s: float = Field(10.0, gt=0)
    """From the first byte to the end of a request's headers; then 408. Turned up, half-sent requests stay longer."""
    body_timeout_s: float = Field(30.0, gt=0)
    """From there to the end of its body; then 408."""
    write_timeout_s: float = Field(60.0, gt=0)
    """How long a client may take nothing of an answer that waits for it; then its request is given up."""
    idle_timeout_s: int = Field(5, ge=1)
    """How long a connection stays open without a request."""
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


class VllmSettings(Section):
    """The proposer inside vLLM. Its settings file is named by OMNIDRAFT_CONFIG."""

    drafter_ids: int = Field(65_536, ge=1)
    """Ids of all running texts together whose keys the drafter keeps; 23 kB each for SmolLM2-135M. Texts beyond that
    are helped by `decode.lookup` alone."""
    keep_left_s: float = Field(60.0, ge=0)
    """How long a text that vLLM works on no longer is remembered: it may have been preempted."""
    most_left: int = Field(256, ge=0)
    """... and how many of them."""
    idle_s: float = Field(5.0, gt=0)
    """Without a pass for so long, what was not yet recorded of the last texts is."""
    trace_rows: int = Field(256, ge=0)
    """Rows of a pass whose log-probabilities are recorded, at most; larger passes are recorded without. Their logits
    are copied: 0.6 MB a row for a vocabulary of 150,000. 0: never."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Serve our Prometheus metrics there on `metrics.host`, from inside vLLM's worker. None: they appear among vLLM's
    own where PROMETHEUS_MULTIPROC_DIR is set."""
