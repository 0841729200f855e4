"""What happened to a pair, as the control log has it: champions, canaries, drifts and their ends, pauses, rewinds."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from omnidraft.fleet.control_log import PARTITION
from omnidraft.ports import Announcement, AnnouncementKind, Message

EventKind = Literal[
    "promoted", "rolled back", "canary", "canary over", "paused", "resumed", "rewound", "drift", "drift over"
]

EVENT_KINDS: Mapping[AnnouncementKind, EventKind] = {
    "champion": "promoted",
    "canary": "canary",
    "pause": "paused",
    "resume": "resumed",
    "rewind": "rewound",
    "drift": "drift",
    "drift_over": "drift over",
}
MOST_EVENTS = 100
"""The number of newest events that are told."""


@dataclass(frozen=True, slots=True)
class ControlEvent:
    """Something that was announced about a pair."""

    at_ms: int
    """Unix time at which the log took the announcement."""
    kind: EventKind
    version: int | None
    """The version it is about; None for what is about traffic or learning."""
    reason: str
    """A sentence for operators, or the tenant; may be empty."""


class ControlHistory:
    """The newest events of one pair, from the genuine announcements about it. Not thread-safe."""

    def __init__(self, *, is_whole: bool) -> None:
        """
        Args:
            is_whole: nothing came before; else the first champion may be an old one, announced again.
        """
        self._events: deque[ControlEvent] = deque(maxlen=MOST_EVENTS)
        self._next_offset = 0
        self._champion: int | None = 0 if is_whole else None
        """0 before the first; None: unknown."""
        self._has_canary = self._is_paused = False

    @property
    def events(self) -> tuple[ControlEvent, ...]:
        """The newest events, oldest first."""
        return tuple(self._events)

    def take(self, message: Message, announcement: Announcement) -> None:
        """Add what this announcement brought about, if anything. They come in the order of the log.

        What stands in another partition than the one we write to, or was taken before, is left out.
        """
        if message.partition != PARTITION or message.offset < self._next_offset:
            return
        self._next_offset = message.next_offset
        kind = self._event_kind(announcement)
        if kind is not None:
            reason = announcement.reason or announcement.tenant or ""
            self._events.append(ControlEvent(message.timestamp_ms, kind, announcement.version, reason))

    def _event_kind(self, announcement: Announcement) -> EventKind | None:
        """Return what happened; None when it says what already holds, as controllers do at their start."""
        kind = EVENT_KINDS[announcement.kind]
        if kind == "promoted":
            return self._change_champion(announcement.version or 0)
        if kind in ("paused", "resumed"):
            was_paused, self._is_paused = self._is_paused, kind == "paused"
            return kind if self._is_paused != was_paused else None
        self._has_canary |= kind == "canary"
        return kind

    def _change_champion(self, version: int) -> EventKind | None:
        """Return what a champion's announcement means after the champion and the canary before it."""
        before, had_canary = self._champion, self._has_canary
        self._champion, self._has_canary = version, False
        if not had_canary and before in (None, version):
            return None
        if before is None or version > before:
            return "promoted"
        return "canary over" if version == before else "rolled back"
