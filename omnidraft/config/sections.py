"""Every setting, with its default and what it does when it is turned up; learning is in learning.py; log, registry,
metrics and tracing in services.py."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from omnidraft.config.learning import (
    GROUP_KEYS,
    CacheSettings,
    ControllerSettings,
    LearnerSettings,
    MemorySettings,
)
from omnidraft.config.secrets import ClientKey, PrivateKeyText
from omnidraft.config.services import LogSettings, MetricsSettings, RegistrySettings, Section, TracingSettings, like

Mode = Literal["fast", "reproducible"]
"""The decoding modes; see DecodeSettings.mode."""
ToolFormat = Literal[
    "hermes", "qwen3_coder", "llama3", "llama4", "mistral", "mistral_args", "deepseek_v3", "deepseek_v31", "glm",
    "kimi", "minimax", "function_gemma", "gemma4", "phi4_mini", "harmony",
]  # fmt: skip
"""The formats of tool calls; see omnidraft/tools/formats.py."""
Kernels = Literal["auto", "portable", "amx", "avx512_bf16", "avx512", "avx2", "neon_i8mm", "neon", "generic", "torch"]
Precision = Literal["auto", "float32", "bfloat16", "packed16", "int8", "int4"]
FunctionPath = Annotated[
    str, like(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", "not a function: use package.module:function")
]
NO_DRAFTER = "none"
"""The name of the drafter where there is none, also in trace records."""
MEMORY_DRAFT_TOKENS = 31
"""The maximal number of tokens drafted per step where the suffix memory drafts, if more than `decode.num_draft_tokens`:
long matches are worth long chains. Only the `cost` policy goes beyond `num_draft_tokens`, as far as it pays."""


class ModelSettings(Section):
    """Which models work together. A name is a catalog name, a local folder or a hub repository id."""

    target: str = "qwen2.5-coder-1.5b"
    """The target. Among several it is the default for requests without `model`, and for commands."""
    more_targets: tuple[str, ...] = ()
    """Further targets of the same worker with the same drafter; requests choose with `model`."""
    drafter: str = "smollm2-135m"
    """`none`: no model drafts, only `decode.suffix_memory` or `decode.lookup`; nothing of a drafter is loaded."""
    memory_of: str | None = None
    """With `drafter = "none"`: the drafter of the pair whose snapshots this worker follows, for the fleet's memory in
    them alone. None follows nobody."""
    engine: Literal["transformers", "llamacpp", "ensemble"] = "transformers"
    """The engine of the target. `llamacpp` runs its GGUF file unconverted, and needs `omnidraft[llamacpp]`. `ensemble`:
    the target and `members` answer together, each as with `transformers`."""
    members: tuple[str, ...] = ()
    """With `engine = "ensemble"`: the other models; all have the target's tokenizer, maybe by `omnidraft transfer`."""
    precision: Precision = "auto"
    """The precision of the target. `auto`: bfloat16 on an accelerator; on a CPU bfloat16 weights in float32 arithmetic
    (`packed16`) or bfloat16, whichever is faster in a trial on this machine. `int8` and `int4` quantize the weights in
    groups of 128 and 32. These three are our kernels, for CPUs only, compiled with g++. Texts depend on the precision:
    set it where several machines serve; a worker that cannot compute it refuses to start. With `engine = "llamacpp"`
    the GGUF file has it."""
    drafter_precision: Precision = "auto"
    """The precision of the drafter; it changes agreement, never the text. `auto`: for models that our kernels
    know, where our kernels work, int4 before anything was learned and int8 after, else the target's `auto`: there int8
    costs agreement."""
    kernels: Kernels = "auto"
    """The instructions of our kernels. `auto`: the widest that survive a trial in a process of its own and are faster
    than torch there, or else the fastest that survive it, or torch. Texts in int8, int4 and float32 are the same with
    all of them, bit for bit; in packed16 with all but `amx` and `avx512_bf16`, which make two and one bfloat16 of each
    input, so a mixed fleet sets `portable`, which leaves them out. A named one has to work: a worker that cannot run it
    refuses to start. `torch` uses no kernels of ours.
    ONEDNN_MAX_CPU_ISA pins the instructions of oneDNN."""
    tool_formats: dict[str, ToolFormat] = Field(default_factory=dict)
    """How a target writes calls of tools, by its name: `hermes` (as Qwen), `llama3` or `mistral`. For a target that is
    not here its chat template says it; see docs/http-api.md."""

    @model_validator(mode="after")
    def _goes_together(self) -> "ModelSettings":
        if self.memory_of is not None and self.has_drafter:
            raise ValueError(
                f"models.memory_of is for drafter = 'none'; a worker with {self.drafter!r} follows its own"
            )
        if (self.engine == "ensemble") != bool(self.members):
            raise ValueError(
                f"models.members are for engine = 'ensemble', and it needs some; engine is {self.engine!r}"
            )
        if self.engine == "llamacpp" and self.precision != "auto":
            raise ValueError(
                "models.precision is for transformers; with models.engine = 'llamacpp' the GGUF file says it"
            )
        return self

    @property
    def followed_drafter(self) -> str:
        """The drafter in the names of the snapshots and of the control log that this process follows."""
        return self.memory_of or self.drafter

    @property
    def has_drafter(self) -> bool:
        """Whether a model drafts."""
        return self.drafter != NO_DRAFTER

    @property
    def targets(self) -> tuple[str, ...]:
        """All targets, each once, `target` first."""
        return tuple(dict.fromkeys((self.target, *self.more_targets)))

    @property
    def names(self) -> tuple[str, ...]:
        """All models that a worker loads, each once: the targets, the members of an ensemble and the drafter."""
        return tuple(dict.fromkeys((*self.targets, *self.members, *([self.drafter] if self.has_drafter else []))))


class DecodeSettings(Section):
    """The defaults of decoding, some of which a request may override."""

    mode: Mode = "fast"
    """`fast`: exact in distribution, equal to plain decoding's text up to rounding. `reproducible`: equal to it bit for
    bit. Targets on our kernels have no cost for it; for others all passes have one shape."""
    policy: Literal["cost", "acceptance", "threshold", "fixed"] = "cost"
    """The drafting policy. `cost`: the tree with the most tokens per second by measured costs and agreement, possibly
    empty. `acceptance`: one chain until the drafter's acceptance head predicts a rejection; learners with this policy
    train one, between the drafter's steps (algorithm 4 of OmniDraft).
    `threshold`: one chain until measured agreement does. `fixed`: one chain of `num_draft_tokens`."""
    num_draft_tokens: int = Field(15, ge=0, le=63)
    """The maximal number of tokens drafted per step, siblings included; 0 turns speculation off. Where the suffix
    memory drafts, the `cost` policy goes up to 31, as far as it pays."""
    suffix_memory: bool = True
    """Also draft what followed the longest end of the text before: in this request, in what this worker lately said to
    the same tenant (omnidraft/memory/recent_texts.py), and in the fleet's memory of the tenant."""
    lookup: bool = True
    """Without `suffix_memory`, which includes it, and inside vLLM: also draft by prompt lookup, the tokens that
    followed the same tokens earlier in the request."""
    splits: bool = True
    """Also draft with the drafter's tokens that the target spells in several of its own. Without them such tokens are
    unmapped, as in a direct map of two vocabularies. Merges of several of the drafter's tokens: `cache.mode`."""
    trees: bool = True
    """Draft trees: runners-up, branches, readings side by side. Without them each text is drafted one chain."""
    threads: int | None = Field(None, ge=1)
    """Threads of the numeric kernels; texts depend on it, except with our own kernels, which take fewer threads while
    other processes keep the cores busy. None: the machine's cores, of which a container counts those that its quota of
    processor time amounts to."""

    @property
    def num_memory_tokens(self) -> int:
        """The tokens that a step drafts at most where the suffix memory drafts; 0: as many as elsewhere."""
        has_memory = self.suffix_memory and self.policy == "cost" and self.num_draft_tokens > 0
        return MEMORY_DRAFT_TOKENS if has_memory else 0


class SchedulerSettings(Section):
    """Many texts in one target."""

    max_num_seqs: int = Field(16, ge=1, le=1024)
    """The number of texts that are decoded together; more wait."""
    kv_cache_gib: float = Field(4.0, gt=0)
    """Memory for each target's keys and values, in GiB. When it is full, cached prefixes go first, and the newest text
    waits then; its keys are computed again."""


class RecorderSettings(Section):
    """Recording of traces for the learner."""

    enabled: bool = True
    opted_out: frozenset[str] = frozenset()
    """Tenants whose requests are never recorded, whatever a request says."""
    redactor: FunctionPath | None = None
    """`package.module:function` that is applied to every record before it is written: it takes a TraceRecord and
    returns one, or None to record nothing. `omnidraft.traces.redaction` has two: `hashed_tenant` and
    `without_prompts`."""
    queue_records: int = Field(1024, ge=1)
    """Records that may wait for the log; a full queue drops and counts records, it never blocks."""
    top_k: int = Field(16, ge=1, le=1024)
    """The target's log-probabilities recorded per position; more teach more and cost 6 bytes each per token."""


TenantName = Annotated[
    str,
    Field(min_length=1, max_length=256),
    like(rf"(?!{GROUP_KEYS})(?s:.*)", f"names that begin with {GROUP_KEYS!r} are those of groups' keys"),
]
HostName = Annotated[str, Field(pattern=r"^(\*|[^\s:/*]+)$"), AfterValidator(lambda name: name.lower().rstrip("."))]


class ApiKey(Section):
    """A key that clients send as `Authorization: Bearer KEY`."""

    key: ClientKey
    """Printable ASCII without spaces; `omnidraft traces new-key` makes one."""
    tenant: TenantName | None = None
    """The tenant of its requests, whatever their `user` says; no other key may name it. None: their `user`, unless
    another key has that tenant, else `worker.tenant`."""


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
    metrics_key: ClientKey | None = None
    """The key that /metrics asks for, as `Authorization: Bearer KEY`; none of `api_keys`. None: everybody who reaches
    the port may read how much all tenants send together. `omnidraft status` and Prometheus need it too."""
    receipt_key: PrivateKeyText | None = None
    """The private key that signs receipts of answers, here and in `omnidraft generate --receipt`. None: there are none.
    Give it as OMNIDRAFT_WORKER__RECEIPT_KEY; `omnidraft snapshots new-key --role worker` makes one."""
    page: bool = True
    """Whether `/` is a page on which to ask and watch. With `api_keys` it asks for a key."""
    max_queue: int = Field(1024, ge=1)
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
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages, besides those of this machine, that may ask from a browser; "*" allows all."""
    strict_fields: bool = False
    """Whether a field that is not known is a 400. Else it is ignored, and the response's header x-omnidraft-ignored and
    the log name it."""
    model_aliases: dict[str, str] = Field(default_factory=dict)
    """Other names under which clients ask for a served target; "*" stands for any name."""
    idle_timeout_s: int = Field(5, ge=1)
    """The time for which a connection stays open without a request; behind a proxy, longer than the proxy's own."""
    max_new_tokens: int | None = Field(None, ge=1)
    """The most tokens of an answer, whatever the request says; None: as many as the context holds."""
    drain_timeout_s: float = Field(15.0, ge=0)
    """The time accepted requests have to finish after SIGTERM; then they end with an error. Whatever kills the process
    has to wait 10 seconds longer, for the log to take the last records."""
    poll_s: float = Field(2.0, gt=0)
    """The longest wait for the control log, and the interval at which the registry is read for a champion while the log
    names none."""
    tenant: TenantName = "default"
    """The tenant of requests that name none."""
    snapshot: str | None = None
    """Serve `models.target` with this folder, version or alias permanently. None: the base drafter, then the
    champion."""

    @model_validator(mode="after")
    def _keeps_keys_and_tenants_apart(self) -> "WorkerSettings":
        if len({each.key.get_secret_value() for each in self.api_keys}) < len(self.api_keys):
            raise ValueError("two of worker.api_keys are the same key")
        if self.metrics_key is not None and any(each.key == self.metrics_key for each in self.api_keys):
            raise ValueError("worker.metrics_key is one of worker.api_keys, so a tenant could read it")
        has_free_key = any(each.tenant is None for each in self.api_keys)
        if has_free_key and any(each.tenant == self.tenant for each in self.api_keys):
            raise ValueError(
                f"worker.tenant is {self.tenant!r}, which a key of worker.api_keys has, and another key without a "
                "tenant would be that tenant too; set worker.tenant to a name of its own"
            )
        return self


class Settings(Section):
    """All settings. Only `load` reads files and the environment."""

    models: ModelSettings = ModelSettings()
    decode: DecodeSettings = DecodeSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    recorder: RecorderSettings = RecorderSettings()
    log: LogSettings = LogSettings()
    registry: RegistrySettings = RegistrySettings()
    learner: LearnerSettings = LearnerSettings()
    cache: CacheSettings = CacheSettings()
    memory: MemorySettings = MemorySettings()
    controller: ControllerSettings = ControllerSettings()
    worker: WorkerSettings = WorkerSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()

    def for_target(self, target: str) -> "Settings":
        """Return the settings of one pair: this target alone, with the drafter."""
        models = self.models.model_copy(update={"target": target, "more_targets": ()})
        pinned = self.worker.snapshot if target == self.models.target else None
        return self.model_copy(update={"models": models, "worker": self.worker.model_copy(update={"snapshot": pinned})})
