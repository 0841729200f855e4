"""Every setting, with its default and what it does when it is turned up; log and registry are in log_registry.py, the
worker's HTTP side and vLLM's proposer in worker.py, metrics and tracing in telemetry.py."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from omnidraft.config.log_registry import LogSettings, RegistrySettings, Section
from omnidraft.config.telemetry import MetricsSettings, TracingSettings
from omnidraft.config.worker import VllmSettings, WorkerSettings

Mode = Literal["fast", "reproducible"]
"""The decoding modes; see DecodeSettings.mode."""


class ModelSettings(Section):
    """Which models work together. A name is a catalog name, a local folder or a hub repository id."""

    target: str = "qwen2.5-coder-1.5b"
    """The target; of several the one for requests that name none, and the one that a distiller or command is about."""
    more_targets: tuple[str, ...] = ()
    """Served by the same worker beside `target`, helped by the same drafter; requests choose with `model`."""
    drafter: str = "smollm2-135m"
    engine: Literal["transformers", "llamacpp"] = "transformers"
    """What runs the target. `llamacpp` runs its GGUF file as it is, and needs `omnidraft[llamacpp]`."""
    precision: Literal["auto", "float32", "bfloat16", "packed16", "int8", "int4"] = "auto"
    """How the target computes. `auto`: bfloat16 on an accelerator; on a processor bfloat16 weights in float32
    arithmetic (`packed16`) or bfloat16, whichever a trial on this machine finds faster. `int8` and `int4` round the
    weights in groups of 32. These three are our kernels, for processors only, compiled with g++. A text depends on it:
    name it where several machines serve, and a worker that cannot compute it refuses to start."""
    drafter_precision: Literal["auto", "float32", "bfloat16", "packed16", "int8"] = "auto"
    """How the drafter computes; it cannot change the text, only how often it is right. `auto`: int8 for models of the
    Llama family where our kernels work, else the target's `auto`: there int8 costs agreement."""
    kernels: Literal["auto", "native", "x86-64-v3", "torch"] = "auto"
    """Which build of our kernels computes. `auto`: the first that a trial in a process of its own survives, then torch.
    Named, it has to work: a worker that cannot run it refuses to start. `native` is compiled for this processor,
    `x86-64-v3` for any with AVX2, `torch` does without. What oneDNN uses, ONEDNN_MAX_CPU_ISA pins."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All of them, each once, `target` first."""
        return tuple(dict.fromkeys((self.target, *self.more_targets)))


class DecodeSettings(Section):
    """How a request is decoded unless it says otherwise."""

    mode: Mode = "fast"
    """`fast`: exact in law, equal to plain decoding's text up to rounding. `reproducible`: that text bit for bit.
    Targets of the Llama family on our kernels pay nothing for it; for others every pass is padded to one width and one
    key capacity, which the next four settings say."""
    width: int = Field(6, ge=2, le=64)
    """Ids in a row of a padded pass: one emitted token and `width - 1` drafted ones."""
    chains: int = Field(1, ge=1, le=16)
    """Rows of a padded pass, each a chain of the tree. Higher takes trees in reproducible mode, and `chains` times the
    memory for keys; a pass computes `chains * width` ids, drafted or not."""
    prefill_rows: int = Field(48, ge=1)
    """Rows of a padded prefill pass."""
    capacity_step: int = Field(256, ge=64)
    """Key capacities are multiples of this; higher means fewer self-tests and more masked work."""
    policy: Literal["cost", "acceptance", "threshold", "fixed"] = "cost"
    """How much is drafted. `cost`: the tree that gives the most tokens per second by measured costs and agreement,
    down to nothing. `acceptance`: one chain until the drafter's acceptance head (`learner.head`) doubts it.
    `threshold`: the same by measured agreement. `fixed`: one chain of `num_draft_tokens`."""
    num_draft_tokens: int = Field(15, ge=0, le=63)
    """Tokens drafted per step at most, siblings included; 0 turns speculation off."""
    drifted_draft_tokens: int = Field(3, ge=1, le=63)
    """The same for a tenant whose traffic drifts, until that is over."""
    min_path_probability: float = Field(0.2, ge=0, lt=1)
    """Where the `threshold` policy stops: below this chance of the whole chain."""
    max_rejection: float = Field(0.7, gt=0, lt=1)
    """Where the `acceptance` policy stops: above this chance of a wrong token in the chain (gamma of SpecDec++)."""
    lookup: bool = True
    """Also draft what followed the same tokens earlier in the request."""
    noise_weight: float | None = Field(None, ge=0, le=1)
    """How much of the target's noise the drafter uses (w of algorithms.md section 3). None: whatever agreed best."""
    threads: int | None = Field(None, ge=1)
    """Threads of the numeric kernels; part of what a text depends on. None: the machine's cores."""


class RecorderSettings(Section):
    """What decoding tells the learner."""

    enabled: bool = True
    opted_out: frozenset[str] = frozenset()
    """Tenants whose requests are answered and never recorded, whatever they ask for."""
    redactor: str | None = None
    """`package.module:function` that every record goes through before it is written: TraceRecord in, TraceRecord or
    None out; None records nothing. `omnidraft.traces.redaction` has two: `hashed_tenant` and `without_prompts`."""
    queue_records: int = Field(1024, ge=1)
    """Records that may wait for the log; a full queue drops and counts, it never blocks."""
    top_k: int = Field(16, ge=1, le=1024)
    """Log-probabilities of the target kept per position; higher teaches more and costs 6 bytes each a token."""
    segment_tokens: int = Field(256, ge=1, le=4096)
    """Emitted tokens per record."""
    window_tokens: int = Field(1024, ge=0)
    """Earlier ids that a later segment of a long answer carries along."""
    drain_timeout_s: float = Field(10.0, ge=0)
    """How long a stopping worker waits for the log to acknowledge what is queued."""

    @field_validator("redactor")
    @classmethod
    def _names_a_function(cls, redactor: str | None) -> str | None:
        if redactor is None or re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", redactor):
            return redactor
        raise ValueError("not a function: use package.module:function")


class AlmSettings(Section):
    """Approximate likelihood matching: the losses `alm` and `alm_tv`. Defaults are its paper's."""

    tau: float = Field(100.0, gt=0)
    """Likelihoods are compared to the power 1 / tau; higher weighs unlikely chunks like likely ones."""
    debias: bool = True
    """Compare text and the start of a word after it, so that a vocabulary with longer words is not punished. The
    target's part of that is a lower bound: what the trace keeps."""
    merge_below: float = Field(0.1, ge=0, lt=1)
    """Chunks grow until a word starts after them with more than this probability; 0 never merges."""


class LearnerSettings(Section):
    """How the drafter learns. Defaults are the paper's (OmniDraft, section 5) unless a measurement says otherwise."""

    loss: str = "dm + 0.2 ngram"
    """A weighted sum of losses by name, such as "nll + 0.2 ngram", which needs no log-probabilities of the target.
    On its beliefs: dm (forward KL), dm_reverse, dm_mixed, dm_paper (OmniDraft's own form), jsd, tv, lk, osd (where the
    drafter was wrong), rejected (what it drafted in vain), alm and alm_tv (chunks of text), ngram_p. On the emitted
    tokens alone: nll, ngram."""
    alm: AlmSettings = AlmSettings()
    train: Literal["full", "lora"] = "full"
    lora_rank: int = Field(32, ge=1)
    learning_rate: float = Field(1e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    head: Literal["off", "joint", "interleaved", "only"] = "off"
    """Whether an acceptance head learns beside the drafter, for `decode.policy = "acceptance"`: in the same steps
    (`joint`), between them from `records_per_step` records of the replay buffer (`interleaved`, algorithm 4 of
    OmniDraft: the drafter learns from every record all the same), or alone with the drafter frozen (`only`). Turned
    off, snapshots have none."""
    head_blocks: int = Field(1, ge=0, le=8)
    """Residual blocks of a fresh head; each costs a square matrix of the drafter's hidden size."""
    head_learning_rate: float = Field(1e-3, gt=0)
    head_rejected_weight: float = Field(6.0, gt=0)
    """What a rejected guess counts for beside an accepted one (SpecDec++: 6); higher ends chains earlier. 1: the head
    tells chances."""
    head_labels: Literal["soft", "hard"] = "soft"
    """`soft`: the target's probability of each guess where a record has it; not under penalties, bias or a grammar, nor
    where drafting looked at the target's noise (`decode.noise_weight`). There, and everywhere with `hard`: whether it
    was accepted, right in the mean, noisier."""
    records_per_step: int = Field(4, ge=1)
    replay_records: int = Field(0, ge=0)
    """Records of earlier steps that each step learns again, drawn evenly over tenants, against forgetting."""
    replay_capacity: int = Field(512, ge=1)
    """Records kept for that and for an interleaved head, about 25 kB each."""
    steps_per_snapshot: int = Field(12, ge=1)
    drift_haste: int = Field(4, ge=1)
    """Snapshots are so many times as frequent while agreement on any tenant's traffic has fallen. What is learned does
    not depend on it."""
    drift_records: int = Field(16, ge=0)
    """Newest records of a tenant whose agreement fell, on which earlier snapshots are compared; 0 compares none."""
    max_tokens: int = Field(768, ge=32)
    """Draft tokens of prompt and answer kept per record; longer ones lose the front of the prompt. Never more than the
    drafter's context holds."""
    held_out_every: int = Field(16, ge=0)
    """Every n-th record measures agreement and is never learned from; 0 keeps none."""
    held_out_records: int = Field(24, ge=1)
    """Held-out records remembered, newest win."""
    max_lag_records: int | None = Field(20_000, ge=0)
    """When more messages than this wait in the log, the learner reads on to its end and learns a sample of what it
    passed; the rest is counted as `sampled_out`. None or 0: every record is learned, however late."""
    lag_sample_records: int = Field(2_000, ge=1)
    """Records in that sample: the newest, evenly over tenants; about 25 kB each in memory."""
    poison_tries: int = Field(3, ge=0)
    """Times that the process may die over a step's records before they are tried one by one, and over one of these
    before it becomes a dead letter. 0: never, and a record that kills the process kills every process after it."""
    journal_folder: Path | None = None
    """Where the distiller notes which records it is about to try. None: a folder of the service, which outlives the
    learner's process and not the service; name one where both end together, as in a container."""
    grad_clip: float = Field(1.0, gt=0)
    seed: int = 0
    threads: int | None = Field(None, ge=1)
    """Threads of a training step; None is one, which leaves the others to requests. On a Ray cluster the learner's node
    has so many processors free for it."""
    ray_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Custom resources that its node must have, as `ray start --resources` gives them: `{distiller = 1}` keeps learners
    off the nodes that serve, and one of them to a node."""
    nice: int = Field(10, ge=0, le=19)
    """Scheduling priority given up, so that requests come first on a shared machine."""

    @model_validator(mode="before")
    @classmethod
    def _learns_on_processors(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "num_gpus" in given:
            raise ValueError(
                "num_gpus is no setting any more: it set GPUs aside that the learner, which computes on processors, "
                "never used. Take it out; learner.threads makes learning faster"
            )
        return given


class CacheSettings(Section):
    """The n-gram cache."""

    capacity: int = Field(200_000, ge=1)
    eviction: Literal["lru", "lfu"] = "lfu"
    warm: bool = False
    """Start with the canonical n-gram of every target token instead of empty."""


class ControllerSettings(Section):
    """When a challenger becomes the champion."""

    poll_s: float = Field(1.0, gt=0)
    tolerance: float = Field(0.0, ge=0)
    """Held-out agreement may be this much lower and still be promoted."""
    confidence: float = Field(0.5, ge=0.5, lt=1)
    """How sure that must be: 0.5 goes by what was measured, 0.95 promotes what is as good with 95 % confidence by the
    held-out requests, which takes more of them, or several snapshots' gains in a row. The same for canaries."""
    speed_tolerance: float = Field(0.02, ge=0)
    """The speed-up foretold from held-out records may be this share lower and still be promoted."""
    canary_share: float = Field(0.0, ge=0, le=0.5)
    """Of the requests, served by a challenger that passed, before it is promoted; 0 promotes without a canary. Which
    ones is decided by the request id, alike on every worker."""
    canary_requests: int = Field(50, ge=2)
    """Requests that canary and champion must both have served before they are compared."""
    canary_tolerance: float = Field(0.05, ge=0)
    """A canary may take this share more seconds per token than the champion and still be promoted."""
    canary_timeout_s: float = Field(600.0, gt=0)
    """After that it is judged by the requests there were; without any it is promoted."""


class DriftSettings(Section):
    """When agreement on a tenant's traffic counts as fallen, and as back. Watched by the controller."""

    enabled: bool = True
    passes_per_value: int = Field(30, ge=1)
    """Target passes with a draft whose agreement is one value of the stream; higher is later and surer."""
    min_values: int = Field(30, ge=10)
    """Before a fall can be told."""
    slack: float = Field(0.03, ge=0)
    """How much below the mean a value may be without counting (delta of the Page-Hinkley test)."""
    threshold: float = Field(1.0, gt=0)
    """The sum of what is below that raises the alarm (its lambda); higher is later and surer."""
    recovered_share: float = Field(0.9, gt=0, le=1)
    """Of the level before, at which a drift is over."""
    settled_values: int = Field(200, ge=10)
    """After so many values without recovery the new level is normal."""


class Settings(Section):
    """All of it. Built by hand it knows nothing of files or the environment; `load` does."""

    models: ModelSettings = ModelSettings()
    decode: DecodeSettings = DecodeSettings()
    recorder: RecorderSettings = RecorderSettings()
    log: LogSettings = LogSettings()
    registry: RegistrySettings = RegistrySettings()
    learner: LearnerSettings = LearnerSettings()
    cache: CacheSettings = CacheSettings()
    controller: ControllerSettings = ControllerSettings()
    drift: DriftSettings = DriftSettings()
    worker: WorkerSettings = WorkerSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    vllm: VllmSettings = VllmSettings()

    def for_target(self, target: str) -> "Settings":
        """The same for one pair: this target alone, with the drafter."""
        models = self.models.model_copy(update={"target": target, "more_targets": ()})
        pinned = self.worker.snapshot if target == self.models.target else None
        return self.model_copy(update={"models": models, "worker": self.worker.model_copy(update={"snapshot": pinned})})
