"""The control log: announcements between the fleet's processes, JSON messages on one topic per fleet.

{"kind": "champion", "version": 7}                  every worker serves this snapshot; ends any canary
{"kind": "canary", "version": 8, "share": 0.1}      serve it to this share of the requests, the champion to the others
{"kind": "pause"} / {"kind": "resume"}              stop or resume learning
{"kind": "restart", "start": "latest", "restart_id": "..."}  learn from earliest, latest or offsets; each is done once
{"kind": "rewind", "version": 7, "restart_id": "..."}  go back to this champion's weights: what came after was refused
{"kind": "drift", "tenant": "t", "work": "text"}    agreement on this tenant's traffic of this kind fell: draft less for
                                                    it, learn faster; "level" is the agreement before
{"kind": "drift_over", "tenant": "t", "work": "text"}  it recovered, or is what is normal now
{"kind": "best", "version": 5, "tenant": "t"}       from the distiller: this snapshot agrees best with that traffic
{"kind": "forget", "tenant": "t", "forget_id": "...", "until_ms": 1764000000000}  keep nothing of the tenant from before
{"kind": "factors_off", "tenant": "t"}              draft for this tenant without its own factors, as for all others
{"kind": "factors_on", "tenant": "t"}               and with them again
Each may name the pair it is about ("target", "drafter"), else it is about all, and may give operators a "reason".
Its offset is its sequence number; the highest holds. All are written to the first partition, however many there are.
Signed ones carry a sequence of their own; see authentication.py.
"""

import json
from dataclasses import dataclass, replace
from typing import Literal, Unpack

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omnidraft.errors import WireError
from omnidraft.ports import Announcement, AnnouncementFields, AnnouncementKind, LogWriter, Message, Outgoing, Work

KEY = b"control"
PARTITION = 0

Subject = Literal["snapshot", "learning", "restart", "rewind", "traffic", "best", "forget", "factors"]
_SUBJECTS: dict[AnnouncementKind, Subject] = {
    "champion": "snapshot",
    "canary": "snapshot",
    "pause": "learning",
    "resume": "learning",
    "restart": "restart",
    "rewind": "rewind",
    "drift": "traffic",
    "drift_over": "traffic",
    "best": "best",
    "forget": "forget",
    "factors_off": "factors",
    "factors_on": "factors",
}
FOR_ALL_PAIRS: frozenset[AnnouncementKind] = frozenset({"forget", "factors_off", "factors_on"})
"""Kinds about a tenant, which concern every pair without naming one."""
_WITH_TENANT = FOR_ALL_PAIRS | {"drift", "drift_over", "best"}


def subject(announcement: Announcement) -> tuple[Subject, str | None, Work | None]:
    """Return its subject, tenant and kind of request; a later announcement with the same ones supersedes it."""
    return _SUBJECTS[announcement.kind], announcement.tenant, announcement.work


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True)  # unknown keys are allowed: a later controller may say more

    kind: AnnouncementKind
    version: int | None = None
    share: float | None = Field(None, gt=0, le=1)
    tenant: str | None = None
    reason: str | None = None
    start: str | None = Field(None, pattern=r"^(earliest|latest|\d{1,9}:\d{1,18}( \d{1,9}:\d{1,18})*)$")
    restart_id: str | None = Field(None, min_length=1, max_length=64)
    forget_id: str | None = Field(None, min_length=1, max_length=64)
    until_ms: int | None = Field(None, ge=0)
    fence: str | None = None
    digest: str | None = None
    sequence: int = 0
    issued_ms: int | None = None
    work: Work | None = None
    level: float | None = Field(None, ge=0, le=1)
    target: str | None = None
    drafter: str | None = None

    @model_validator(mode="after")
    def _has_the_fields_of_its_kind(self) -> "_Wire":
        if (self.kind in ("champion", "canary", "best", "rewind")) != (self.version is not None):
            raise ValueError("champion, canary, best and rewind have a version, nothing else has")
        if (self.kind == "canary") != (self.share is not None):
            raise ValueError("a canary has a share, nothing else has")
        if (self.kind in _WITH_TENANT) != (self.tenant is not None):
            raise ValueError("what is about traffic or factors has a tenant, nothing else has")
        is_of_drift = self.kind in ("drift", "drift_over")
        if is_of_drift != (self.work is not None) or (self.level is not None and not is_of_drift):
            raise ValueError("a drift and its end have a kind of request and may have a level, nothing else has")
        if (self.kind == "restart") != (self.start is not None):
            raise ValueError("a restart has a start, nothing else has")
        if (self.kind in ("restart", "rewind")) != (self.restart_id is not None):
            raise ValueError("restart and rewind have a name, nothing else has")
        if {self.kind == "forget"} != {self.forget_id is not None, self.until_ms is not None}:
            raise ValueError("an order to forget has a name and a time, nothing else has")
        return self


class _AllFields(AnnouncementFields, total=False):
    target: str | None
    drafter: str | None
    start: str
    forget_id: str
    until_ms: int


def publish_announcement(
    writer: LogWriter, kind: AnnouncementKind, version: int | None = None, **fields: Unpack[_AllFields]
) -> None:
    """Publish an announcement to every process. Repeating one does no harm.

    Raises:
        BusError: the log cannot be written.
        ValueError: this kind needs another field, or has none of these.
    """
    writer.append([Outgoing(KEY, announcement_json(kind, version, **fields), partition=PARTITION)])


def announcement_json(kind: AnnouncementKind, version: int | None = None, **fields: Unpack[_AllFields]) -> bytes:
    """Encode an announcement. Raises ValueError when this kind needs another field, or has none of these."""
    wire = _Wire(kind=kind, version=version, **fields)
    return json.dumps(wire.model_dump(exclude_none=True, exclude={"sequence"})).encode()


@dataclass(frozen=True, slots=True)
class LogAnnouncer:
    """Implements ports.Announcer on the control log."""

    writer: LogWriter
    target: str
    drafter: str

    def publish(self, kind: AnnouncementKind, version: int | None = None, **fields: Unpack[AnnouncementFields]) -> None:
        """See ports.Announcer."""
        publish_announcement(self.writer, kind, version, target=self.target, drafter=self.drafter, **fields)


def parse_announcement(message: Message) -> Announcement:
    """Decode an announcement. Raises WireError when the message is not one."""
    if message.damage is not None:
        raise WireError(f"control message {message.partition}:{message.offset}: {message.damage.error}")
    try:
        return replace(parse_payload(message.value), sequence=message.offset)
    except WireError as exc:
        raise WireError(f"control message {message.offset}: {exc}") from exc


def parse_payload(payload: bytes) -> Announcement:
    """Decode an announcement with the sequence it carries, 0 without one. Raises WireError."""
    try:
        return Announcement(**_Wire.model_validate_json(payload).model_dump())
    except ValidationError as exc:
        raise WireError(exc.errors()[0]["msg"]) from exc
