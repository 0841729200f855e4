"""What the processes of a fleet share: the registry of snapshots, and telemetry, whose metrics add up over all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from omnidraft.snapshots.manifest import Manifest

_JUDGEMENT, _IN_WORDS = "omnidraft.judgement", "judgement"
_VERBS = {"canary": "on trial", "promoting": "promoting", "promoted": "promoted", "refused": "refused"}


class Judgement(BaseModel):
    """What the controller decided about a version."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    state: Literal["canary", "promoting", "promoted", "refused"]
    """canary, promoting: it is not decided, or not carried out to its end, so a controller that starts judges it anew.
    The others are final: nothing but another promotion changes them."""
    reason: str
    """A sentence for operators; empty for an order."""
    promotion: str | None = None
    """Names one promotion; promoting the same version again has another name. None: it never was to be promoted."""
    is_ordered: bool = False
    """Whether an operator promoted it."""
    was_canary: bool = False
    """Whether it was tried on live requests."""
    gain: float | None = None
    """Held-out agreement less the champion's; None: not known."""
    gain_error: float | None = None
    """Standard error of the gain; None: not known."""

    @property
    def is_final(self) -> bool:
        return self.state in ("promoted", "refused")

    def __str__(self) -> str:
        verb = f"{_VERBS[self.state]} by an operator" if self.is_ordered else _VERBS[self.state]
        return f"{verb}: {self.reason}" if self.reason else verb

    def notes(self) -> dict[str, str]:
        """Return it as notes of a version, for programs and in words."""
        return {_JUDGEMENT: self.model_dump_json(exclude_defaults=True), _IN_WORDS: str(self)}

    @classmethod
    def of(cls, notes: Mapping[str, str] | None) -> "Judgement | None":
        """Return the judgement in a version's notes. Damaged notes, or None, may have held a decision against it, and
        count as a refusal."""
        try:
            text = notes[_JUDGEMENT] if notes is not None else ""
            return cls.model_validate_json(text)
        except KeyError:
            return None
        except ValidationError:
            return cls(state="refused", reason="its notes are damaged")


@dataclass(frozen=True, slots=True)
class SnapshotVersion:
    """A snapshot in the registry."""

    version: int
    manifest: Manifest
    aliases: tuple[str, ...]
    created_ms: int
    judgement: Judgement | None = None
    """None: nothing was decided yet."""
    removed_parts: tuple[str, ...] = ()
    """Parts whose files were deleted since; the manifest stays."""

    @property
    def is_servable(self) -> bool:
        """Return whether its weights are still there."""
        return "serving" not in self.removed_parts


class SnapshotReader(Protocol):
    """Finds and fetches snapshots."""

    def resolve(self, name: str) -> SnapshotVersion:
        """Find a version by alias (champion, challenger, previous), `latest` or number. Raises SnapshotNotFound."""

    def fetch(self, version: int, into: Path, parts: Sequence[str] = ("serving",)) -> Path:
        """Return a local snapshot folder with these parts, checksums verified. Raises SnapshotNotFound,
        SnapshotCorrupt."""


class Registry(SnapshotReader, Protocol):
    """Versions and aliases of the snapshots of one (drafter, target) pair. Safe for several processes."""

    def publish(self, bundle: Path, parent: int | None) -> SnapshotVersion:
        """Add a snapshot folder as the next version, point `challenger` at it, and delete the parts of old versions
        that are kept no longer (`registry.keep_resume`, `registry.keep_serving`); those that cannot be deleted are
        logged, and tried again by the next publication. `parent` is the newest version that the publisher knows. One
        that is the newest version already is not added again, and not `challenger` if anything was decided about it.

        Raises:
            SnapshotStale: another process has published since.
            SnapshotCorrupt: a file of the bundle does not match its manifest.
            RegistryError: refused or cannot be reached.
        """

    def versions(self, newest: int | None = None) -> tuple[SnapshotVersion, ...]:
        """Return all versions, oldest first; or this many newest ones and those with an alias, which costs the same
        after years of learning."""

    def promote(self, version: int, previous: int | None = None) -> None:
        """Move `champion` to this version, and `previous` to that one, or to the last champion. Neither champion is
        `challenger` any longer, so that a rollback is not undone. Only the controller calls it, once the control log
        names the champion.

        Raises:
            SnapshotNotFound: there is no such version, or its serving part was deleted.
        """

    def annotate(self, version: int, notes: Mapping[str, str]) -> None:
        """Store short texts shown with this version, for example why it was promoted; a new one of a name replaces the
        old one."""

    def remove_files(self, version: int, parts: Sequence[str]) -> None:
        """Delete these parts of a version; the version stays in the list, and `fetch` of a deleted part raises
        SnapshotNotFound. Without its serving part it is no longer `challenger` or `previous`. Deleting again does no
        harm.

        Raises:
            SnapshotError: it is the champion, whose serving part stays.
            RegistryError: files of these parts could not be deleted; deleting again goes on.
        """


class Metrics(Protocol):
    """Counters and distributions; names end in their unit. Never raises."""

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None: ...

    def observe(self, name: str, value: float, **labels: str) -> None: ...

    def set(self, name: str, value: float, **labels: str) -> None: ...


class Span(Protocol):
    """One unit of work in progress. Any thread may end it, once; a span that is not ended is not exported. Never
    raises."""

    @property
    def context(self) -> str | None:
        """The W3C traceparent for its children; None: there is no trace to continue."""

    def end(self, **facts: str | float | bool) -> None:
        """End the span; the attribute `error` describes the error, if there was one."""


class Tracing(Protocol):
    """Exports spans. It never blocks: spans that it cannot export are dropped. Never raises."""

    is_on: bool
    """Whether spans are exported; frequent spans are begun only then."""

    def begin(
        self,
        name: str,
        *,
        parent: str | None = None,
        links: Sequence[str] = (),
        ago_s: float = 0.0,
        **facts: str | float | bool,
    ) -> Span:
        """Begin a span that started `ago_s` seconds ago. `parent` and `links` are contexts; without a parent a new
        trace begins."""

    def close(self) -> None:
        """Export the queued spans, waiting for a few seconds at most. No span may be begun afterwards."""


@dataclass(frozen=True, slots=True)
class NoopSpan:
    """A Span that is not exported: its children continue the trace of its parent."""

    context: str | None

    def end(self, **facts: str | float | bool) -> None: ...


class NoopTracing:
    """The Tracing of a process that is not traced."""

    is_on = False

    def begin(self, name: str, *, parent: str | None = None, **_: object) -> NoopSpan:
        return NoopSpan(parent)

    def close(self) -> None: ...
