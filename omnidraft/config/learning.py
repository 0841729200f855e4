"""Settings of learning: the learner and its losses, the n-gram cache, promotion and drift."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from omnidraft.config.services import Section


class LearnerSettings(Section):
    """Training of the drafter. Defaults are the paper's (OmniDraft, section 5) unless measurements favour others."""

    loss: str = "dm + 0.2 ngram"
    """A weighted sum of losses by name, such as "nll + 0.2 ngram", which needs no log-probabilities of the target.
    On the target's log-probabilities: dm (forward KL), dm_reverse, dm_paper (OmniDraft's own form), tv and alm (chunks
    of text). On the emitted tokens alone: nll, ngram."""
    train: Literal["full", "lora"] = "full"
    lora_rank: int = Field(32, ge=1)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """The format of a training step's products; weights, their gradients and the optimizer stay in float32. `bfloat16`
    is faster on processors that multiply it (AMX, AVX-512 BF16) and slower on others. `auto` is the faster one in a
    trial on this machine; a learner that resumes keeps the format that it began with."""
    learning_rate: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """`auto` fits any drafter: full weights move in proportion to their size, about 1e-4 in SmolLM2-135M and 1e-5 in
    Qwen2.5-Coder-0.5B; LoRA factors by 1e-4. A number holds for all weights."""
    records_per_step: int = Field(4, ge=1)
    replay_records: int = Field(0, ge=0)
    """Records of earlier steps that each step replays against forgetting, sampled evenly over tenants."""
    factor_tenants: int = Field(0, ge=0)
    """Tenants that have low-rank factors of their own over the shared drafter: those with most records in the replay
    buffer, and with 4 held-out requests or more. 0: none. With SmolLM2-135M each takes 4.9 MB in every worker for each
    snapshot that is loaded, 9.8 MB in the learner and in the resume part of a snapshot; `tenants` names those who may
    have some."""
    steps_per_snapshot: int = Field(12, ge=1)
    max_tokens: int = Field(768, ge=32)
    """Draft tokens of prompt and answer used per record; longer ones lose the front of the prompt. The drafter's
    context limits it too."""
    held_out_every: int = Field(16, ge=0)
    """The answers to one prompt in so many measure agreement and are never learned from; 0 holds none out."""
    pinned_held_out: Path | None = None
    """A trace archive (`omnidraft traces export --held-out`) of up to 256 records that judges every snapshot too: one
    that agrees less with it than the champion is not promoted. Writers of the log cannot change it. Records of this log
    have to be held-out ones, or they judge what was learned from them. Each record is measured for every snapshot and
    takes 25 kB."""
    tenants: tuple[str, ...] = ()
    """Tenants with a share of their own; all others have one together. Name them where requests can name any tenant
    (API keys without one, or no keys): else a sender with many names has many shares. Empty: every name has a share."""
    max_lag_records: int = Field(20_000, ge=0)
    """When more messages than this wait in the log as a snapshot is made, learning goes on at the newest, a tenth of
    this number; those before are counted as `passed_over`. 0: every record is learned, however late."""
    journal_folder: Path | None = None
    """The folder of the crash journal, written before each step, and of the note that a Kafka log lost messages. None:
    a folder of the service, which outlives the learner's process but not the service; set it where both end together,
    as in a container."""
    host: Literal["auto", "process", "ray"] = "auto"
    """Where the learner runs. `process`: in the distiller's own process, for one target; a crash ends it, and whoever
    supervises it starts it again. `ray`: in a Ray actor for each target, which Ray starts again when it crashes. `auto`
    takes Ray for several targets, or if RAY_ADDRESS names a cluster."""
    threads: int | None = Field(None, ge=1)
    """Threads of a training step; None is one, which leaves the others to requests. On a Ray cluster the learner
    reserves as many CPUs."""
    ray_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Custom Ray resources that the learner reserves (`ray start --resources`): `{distiller = 1}` keeps learners off
    the nodes that serve, and at one per node."""


class CacheSettings(Section):
    """The n-gram cache, which maps several tokens of the drafter to one of the target."""

    mode: Literal["online", "frozen", "off"] = "online"
    """`online`: workers and the distiller learn entries from what the target emits. `frozen`: entries stay those of the
    snapshot, or none; where a tenant is forgotten, none. `off`: frozen, and never drafted from, so nothing is
    merged."""
    capacity: int = Field(200_000, ge=1)
    """Entries, of 24 bytes each; the least used ones make way."""


GROUP_KEYS = "memory group "
"""What the names begin with under which a key store keeps the keys of groups' memories; requests may name no tenant
so."""


class MemorySettings(Section):
    """The fleet's memory: what the fleet said to a tenant, which its workers draft from. The distiller makes it from
    the records that it learns, and snapshots carry it to the workers, at 8 bytes a token."""

    tokens_per_tenant: int = Field(500_000, ge=0)
    """Tokens kept of a tenant, the newest. A memory that changed is built anew for every snapshot: a second of the
    learner's time for a million tokens. 0: there is no memory."""
    total_tokens: int = Field(10_000_000, ge=1)
    """Tokens kept of all tenants together; beyond it the largest memory loses its oldest texts. 80 MB in each of the
    snapshots that keep it (`registry.keep_resume`), less what did not change where the registry links files."""
    max_tenants: int = Field(200, ge=1, le=400)
    """Tenants that have a memory, those that were heard of last. Each is a file in the snapshot and in its manifest."""
    groups: dict[str, str] = Field(default_factory=dict)
    """Tenant, as records name it -> group: the tenants of a group share one memory, so each is drafted what was said to
    others. Give distillers and workers the same; without an entry a tenant's memory is for itself alone."""


class ControllerSettings(Section):
    """The rule by which a challenger becomes the champion."""

    tolerance: float = Field(0.0, ge=0)
    """Held-out agreement may be this much lower and still be promoted."""
    confidence: float = Field(0.5, ge=0.5, lt=1)
    """The confidence of that comparison, and of a canary's: 0.5 compares the measured values, 0.95 promotes only what
    is as good with 95 % confidence by the held-out requests, which takes more of them, or gains of several
    snapshots."""
    speed_tolerance: float = Field(0.02, ge=0)
    """The speed-up predicted from held-out records may be this share lower and still be promoted; a canary may take
    this share more seconds per token than the champion, or 5 %, whichever is more."""
    canary_share: float = Field(0.0, ge=0, le=0.5)
    """The share of the requests that a challenger serves before it is promoted; 0 promotes without a canary. The
    request id decides which requests these are, alike on every worker."""
    canary_requests: int = Field(50, ge=2)
    """Requests that canary and champion must both have served before they are compared. Where that leaves it open
    whether the canary is too slow, or fewer come, they are compared after ten minutes. Without traffic it is promoted
    then; where only the champion served though requests were due to the canary, as no worker could load it, it is
    refused."""
