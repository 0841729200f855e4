"""What the controller tells every process: JSON messages on the control topic, one topic per fleet.

{"kind": "champion", "version": 7, "target": "big", "drafter": "small"}    serve this snapshot of this pair
{"kind": "pause"} / {"kind": "resume"}    stop or go on learning
A message that names no target or no drafter is about each of them. Its offset is its sequence number; the highest
holds. All have one key, so they share one partition.
"""

import json
import logging
from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from omnidraft.errors import WireError
from omnidraft.ports import Announcement, LogReader, LogWriter, Message, Metrics, Outgoing

logger = logging.getLogger(__name__)

KEY = b"control"
MAX_MESSAGES = 1000


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True)  # unknown keys are allowed: a later controller may say more

    kind: Literal["champion", "pause", "resume"]
    version: int | None = None
    target: str | None = None
    drafter: str | None = None

    @model_validator(mode="after")
    def _champion_has_a_version(self) -> "_Wire":
        if (self.kind == "champion") != (self.version is not None):
            raise ValueError("a champion has a version, nothing else has")
        return self


def announce(writer: LogWriter, version: int, *, target: str | None = None, drafter: str | None = None) -> None:
    """Every worker of this pair shall serve this version. Raises BusError; saying it twice does no harm."""
    _append(writer, _Wire(kind="champion", version=version, target=target, drafter=drafter))


def pause(writer: LogWriter, *, target: str | None = None, drafter: str | None = None) -> None:
    """Learning of these stops until `resume`. Raises BusError."""
    _append(writer, _Wire(kind="pause", target=target, drafter=drafter))


def resume(writer: LogWriter, *, target: str | None = None, drafter: str | None = None) -> None:
    """Learning of these goes on. Raises BusError."""
    _append(writer, _Wire(kind="resume", target=target, drafter=drafter))


def read(message: Message) -> Announcement:
    """Raises WireError when it is not an announcement."""
    try:
        wire = _Wire.model_validate_json(message.value)
    except ValidationError as exc:
        raise WireError(f"control message {message.offset}: {exc.errors()[0]['msg']}") from exc
    return Announcement(message.offset, wire.kind, wire.version, wire.target, wire.drafter)


class ControlFollower:
    """Reads the control topic from its first message on, and tells the newest announcement of the kinds it follows.

    A worker follows `champion`; a distiller follows `pause` and `resume` together, whose newest is the state.
    """

    def __init__(
        self,
        reader: LogReader,
        metrics: Metrics,
        *,
        kinds: Collection[str] = ("champion",),
        target: str | None = None,
        drafter: str | None = None,
        must_be_named: bool = False,
    ) -> None:
        """
        Args:
            target: tell only what is about this target; None tells what is about any. `drafter` likewise.
            must_be_named: pass over messages that name no pair; for a follower of one pair among several, to which a
                bare version number says nothing.
        """
        self._reader = reader
        self._metrics = metrics
        self._kinds = frozenset(kinds)
        self._target, self._drafter = target, drafter
        self._must_be_named = must_be_named
        self._next: dict[int, int] = {}
        self._untold: Announcement | None = None
        reader.seek({})

    def poll(self, timeout_s: float) -> Announcement | None:
        """The newest that was not told yet; None when the timeout passes without one.

        What is superseded is skipped: after a long absence only the last champion is told.

        Raises:
            BusError: the log cannot be read; polling again may succeed, and nothing is lost.
        """
        ends = self._reader.end_offsets()
        while True:
            polled = self._reader.poll(MAX_MESSAGES, timeout_s)
            self._next |= polled.next_offsets
            self._untold = self._newest(polled.messages) or self._untold
            has_caught_up = all(self._next.get(partition, 0) >= end for partition, end in ends.items())
            if not polled.messages or has_caught_up:
                told, self._untold = self._untold, None
                return told

    def _newest(self, messages: Sequence[Message]) -> Announcement | None:
        readable = [told for message in messages if (told := self._readable(message)) and self._is_ours(told)]
        return max(readable, key=lambda told: told.sequence, default=None)

    def _is_ours(self, told: Announcement) -> bool:
        if self._must_be_named and (told.target is None or told.drafter is None):
            return False
        is_about_us = _may_be(told.target, self._target) and _may_be(told.drafter, self._drafter)
        return is_about_us and told.kind in self._kinds

    def _readable(self, message: Message) -> Announcement | None:
        try:
            return read(message)
        except WireError as exc:
            logger.warning("skipped %s", exc)
            self._metrics.add("omnidraft_control_messages_skipped_total")
            return None


def _may_be(named: str | None, ours: str | None) -> bool:
    return named is None or ours is None or named == ours


def _append(writer: LogWriter, wire: _Wire) -> None:
    value = json.dumps(wire.model_dump(exclude_none=True)).encode()
    writer.append([Outgoing(KEY, value)])
