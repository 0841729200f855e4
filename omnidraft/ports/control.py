"""The control log: what holds in a fleet, by key. A value replaces the one before it under the same key.

What a key is about is its first part, what follows narrows it: `("champion",)`, `("drift", "tenant", "text")`. Kinds in
FLEET_KINDS concern every pair; the others belong to the pair of the log that they are put into.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from omnidraft.ports.decoding import Work
from omnidraft.snapshots.manifest import Manifest

Key = tuple[str, ...]
"""A kind and what narrows it."""


class ControlValue(BaseModel):
    """What holds under a key. Fields that are not known here are ignored: a later process may say more."""

    model_config = ConfigDict(frozen=True)


class Champion(ControlValue):
    """`champion`: every worker serves this snapshot; ends any canary from before it."""

    version: int
    digest: str | None = None
    """The digest of its manifest: whatever the registry has under this version, it must be that one."""
    lease: int = 0
    """The sequence of the lease under which it was put; 0: nobody had one."""
    promotion: str | None = None
    """Names this promotion; the same version promoted again has another name. The version's judgement has it, too."""
    previous: int | None = None
    """The champion before it."""
    is_ordered: bool = False
    """Whether an operator made it the champion."""


class Canary(Champion):
    """`canary`: serve this snapshot to a share of the requests, the champion to the others. No canary outlives its
    controller."""

    share: float = Field(gt=0, le=1)


class Pause(ControlValue):
    """`pause`: nothing is learned."""


class Restart(ControlValue):
    """`restart`: learning continues elsewhere in the trace log. Each is carried out once."""

    start: str = Field(pattern=r"^(earliest|latest|\d{1,9}:\d{1,18}( \d{1,9}:\d{1,18})*)$")
    """The position: `earliest`, `latest`, or offsets such as `0:120 1:96`."""
    id: str = Field(min_length=1, max_length=64)


class Rewind(ControlValue):
    """`rewind`: learning goes back to the weights of this version. Each is carried out once."""

    version: int
    id: str = Field(min_length=1, max_length=64)
    """The snapshot that learning leaves, and all that descend from it: it was refused, or an operator gave it up."""
    is_ordered: bool = False
    """Whether an operator ordered it. Else the version is the champion, and where that is another by now, that one."""


class Drift(ControlValue):
    """`drift/TENANT/WORK`: agreement on this traffic fell: draft less for it, learn faster."""

    level: float = Field(ge=0, le=1)
    """The mean agreement before it fell."""


class Best(ControlValue):
    """`best/TENANT`, from the distiller: this snapshot agrees best with the tenant's traffic, which drifted."""

    version: int
    promotion: str | None = None
    """That of the champion it was compared with; where another one is in force, the comparison is void."""


class Forget(ControlValue):
    """`forget/TENANT`: keep nothing of the tenant from before. Concerns every pair."""

    id: str = Field(min_length=1, max_length=64)
    """So that manifests can say that it was carried out."""
    until_ms: int = Field(ge=0)
    """Unix milliseconds: it concerns the tenant's records up to then, the newest when it was given."""
    first_offsets: Mapping[int, int] = {}
    """Partition -> offset of the tenant's first message there. Not empty: weights forget too, as learning goes back to
    before these messages and learns the log again without the tenant."""
    before: "Forget | None" = None
    """The order from before it by which weights forget, which it replaces under its key, and which holds as well."""

    @property
    def exact(self) -> "Forget | None":
        """The newest order by which weights forget; None: there is none."""
        return self if self.first_offsets else self.before

    def concerns(self, manifest: Manifest) -> bool:
        """Return whether weights are to forget what this snapshot's learned from the tenant."""
        if (exact := self.exact) is None or exact.id in manifest.forgets:
            return False
        return any(manifest.offsets.get(each, 0) > offset for each, offset in exact.first_offsets.items())


class FactorsOff(ControlValue):
    """`factors/TENANT`: draft for this tenant without its own factors. Concerns every pair."""


class Order(ControlValue):
    """`order/ID`: an operator wants this version to be the champion; removed when it was carried out or refused."""

    version: int


class Lease(ControlValue):
    """`lease`: a controller decides for the pair from now on, and no earlier one any longer."""

    holder: str
    """Names the controller."""
    accepts: int = 0
    """The sequence of the champion that its holder found; of champions put later only its own count."""


class WorkerNews(ControlValue):
    """`worker/NAME`: a worker that runs, put again every WORKER_NEWS_S. Concerns every pair, and nobody signs it."""

    address: str | None
    """Its URL; None: it is behind another one's."""
    release: str
    """The version of its code."""
    serves: Mapping[str, int | None]
    """Target -> version of the snapshot; None: the base drafter."""


WORKER_NEWS_S = 30.0
VALUES: Mapping[str, type[ControlValue]] = {
    "champion": Champion,
    "canary": Canary,
    "pause": Pause,
    "restart": Restart,
    "rewind": Rewind,
    "drift": Drift,
    "best": Best,
    "forget": Forget,
    "factors": FactorsOff,
    "order": Order,
    "lease": Lease,
    "worker": WorkerNews,
}
FLEET_KINDS = frozenset({"forget", "factors", "worker"})
"""What concerns every pair."""

_Value = TypeVar("_Value", bound=ControlValue)


@dataclass(frozen=True, slots=True)
class Entry:
    """The newest value under a key."""

    key: Key
    value: ControlValue | None
    """None: it was removed."""
    sequence: int
    """Grows over all entries of a log, whoever puts them: the newest holds."""
    at_ms: int
    """When it was put, by the clock of who put it, in Unix milliseconds."""
    reason: str | None = None
    """A sentence for operators."""

    @property
    def kind(self) -> str:
        return self.key[0]


@dataclass(frozen=True, slots=True)
class ControlState:
    """What holds for one pair. It never changes; a later poll returns another one."""

    entries: Mapping[Key, Entry] = field(default_factory=dict)

    def value(self, kind: type[_Value], *key: str) -> _Value | None:
        """Return the value under this key, if it is of this kind."""
        entry = self.entries.get(key)
        return entry.value if entry is not None and isinstance(entry.value, kind) else None

    def of(self, kind: type[_Value]) -> dict[Key, _Value]:
        """Return all values of a kind, by what follows it in their keys."""
        return {each.key[1:]: each.value for each in self.entries.values() if type(each.value) is kind}

    def sequence(self, *key: str) -> int:
        """Return the sequence of the newest value under a key, removed or not; 0 without any."""
        entry = self.entries.get(key)
        return 0 if entry is None else entry.sequence

    @property
    def champion(self) -> Champion | None:
        """What serves. None, so that nothing changes, where it is of a controller that had lost its lease: the holder
        puts its own again."""
        entry, lease = self.entries.get(("champion",)), self.value(Lease, "lease")
        champion = self.value(Champion, "champion")
        if entry is None or champion is None:
            return None
        is_accepted = lease is not None and entry.sequence <= lease.accepts
        return champion if is_accepted or champion.lease == self.sequence("lease") else None

    @property
    def canary(self) -> Canary | None:
        """The canary that serves, which the next champion, or the same one put again, ends."""
        canary = self.value(Canary, "canary")
        is_ours = canary is not None and canary.lease == self.sequence("lease")
        return canary if is_ours and self.sequence("canary") > self.sequence("champion") else None

    @property
    def is_paused(self) -> bool:
        return self.value(Pause, "pause") is not None

    def is_drifting(self, tenant: str, work: Work) -> bool:
        """Return whether the tenant's requests of this kind drift."""
        return self.value(Drift, "drift", tenant, work) is not None

    def has_factors_off(self, tenant: str) -> bool:
        """Return whether the tenant is drafted for without its own factors."""
        return self.value(FactorsOff, "factors", tenant) is not None

    @property
    def forgets(self) -> dict[str, Forget]:
        """The newest order to forget each tenant."""
        return {key[0]: order for key, order in self.of(Forget).items()}

    def forget(self, tenant: str) -> Forget | None:
        """Return the newest order to forget the tenant."""
        return self.value(Forget, "forget", tenant)


class ControlFollower(Protocol):
    """Follows what holds for one pair, from one thread."""

    def poll(self, timeout_s: float) -> tuple[ControlState, Sequence[Entry]]:
        """Return what holds now, and the newest entry of each key that changed since the last call, in the order of
        their sequences; wait up to `timeout_s` for a change.

        Raises:
            BusError: the log cannot be read; polling again may succeed, and no change is lost.
        """

    def poll_all(self, timeout_s: float) -> tuple[ControlState, Sequence[Entry]]:
        """Do what `poll` does, for a start: nothing that the log holds by now is missing.

        Raises:
            BusError: the log cannot be read, or gave nothing for `timeout_s` before its end; then it may be repeated.
        """


class ControlWriter(Protocol):
    """Puts values for one pair, from one thread."""

    def put(self, key: Key, value: ControlValue | None, reason: str | None = None) -> None:
        """Let this hold for every process, from now on; None removes what holds. Repeating it does no harm.

        Raises:
            BusError: the log cannot be written.
            ConfigError: values are signed, and this process has no key that may sign this kind.
        """


class ControlLog(ControlFollower, ControlWriter, Protocol):
    """Both, over one log."""

    def close(self) -> None: ...
