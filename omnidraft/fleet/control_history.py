"""What happened to a pair, as the control log has it: champions, canaries, drifts and their ends, pauses, rewinds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from omnidraft.errors import WireError
from omnidraft.fleet.control_follower import Authenticator
from omnidraft.fleet.control_log import PARTITION, parse_announcement, subject
from omnidraft.ports import Announcement, LogReader, Message

EventKind = Literal[
    "promoted", "rolled back", "canary", "canary over", "paused", "resumed", "rewound", "drift", "drift over"
]

_KINDS: dict[str, EventKind] = {
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
MOST_MESSAGES = 5000
"""The number of newest messages in which they are looked for."""


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


def read_control_history(
    reader: LogReader,
    *,
    target: str,
    drafter: str,
    timeout_s: float,
    authenticator: Authenticator | None = None,
) -> tuple[ControlEvent, ...]:
    """Return the newest events of a pair, oldest first, without announcements that are not genuine.

    Raises:
        BusError: the log cannot be read.
    """
    end = reader.end_offsets().get(PARTITION, 0)
    is_whole = end <= MOST_MESSAGES and not reader.first_offsets().get(PARTITION, 0)
    reader.seek_back(MOST_MESSAGES)
    told = (
        (message, announcement)
        for message in _messages(reader, end, timeout_s)
        if (announcement := _parse(message, authenticator)) is not None
        and announcement.kind in _KINDS
        and announcement.target in (None, target)
        and announcement.drafter in (None, drafter)
    )
    return tuple(_events(_without_replays(told), knows_champion=is_whole))[-MOST_EVENTS:]


def _messages(reader: LogReader, end: int, timeout_s: float) -> Iterator[Message]:
    offset = 0
    while offset < end:
        polled = reader.poll(MOST_MESSAGES, timeout_s)
        if not polled.next_offsets:
            return
        yield from (message for message in polled.messages if message.partition == PARTITION)
        offset = polled.next_offsets.get(PARTITION, offset)


def _without_replays(told: Iterable[tuple[Message, Announcement]]) -> Iterator[tuple[Message, Announcement]]:
    """Leave out old announcements that somebody sent again, as the follower of the log refuses them."""
    newest: dict[object, int] = {}
    for message, announcement in told:
        if announcement.sequence >= newest.get(subject(announcement), 0):
            newest[subject(announcement)] = announcement.sequence
            yield message, announcement


def _parse(message: Message, authenticator: Authenticator | None) -> Announcement | None:
    try:
        return authenticator.authenticate(message) if authenticator else parse_announcement(message)
    except WireError:
        return None  # the follower of the log counts and logs it


def _events(told: Iterable[tuple[Message, Announcement]], *, knows_champion: bool) -> Iterator[ControlEvent]:
    """Yield each announcement but those that say what already holds, as controllers do at their start.

    Args:
        knows_champion: nothing came before; else the first champion may be an old one, announced again.
    """
    champion, is_canary, is_paused = 0, False, False
    for message, announcement in told:
        kind, version = _KINDS[announcement.kind], announcement.version or 0
        is_old = kind in ("paused", "resumed") and is_paused == (kind == "paused")
        if kind == "promoted":
            is_old = not is_canary and (version == champion or not knows_champion)
            kind = "rolled back" if version < champion else "canary over" if version == champion else kind
            champion, is_canary, knows_champion = version, False, True
        is_canary |= kind == "canary"
        is_paused = kind == "paused" or (is_paused and kind != "resumed")
        if not is_old:
            reason = announcement.reason or announcement.tenant or ""
            yield ControlEvent(message.timestamp_ms, kind, announcement.version, reason)
