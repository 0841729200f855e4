"""Signed announcements: who may sign which, in what order they hold, and how old they may be.

A signed announcement is the JSON of control_log.py with two more fields, `sequence` and `issued_ms`; the signatures are
in the message's header `signatures`, as JSON from key id to hex, so that readers without keys read on. Sequences grow
over all who sign: each is the time in milliseconds, or one more than the newest in the control log where clocks differ
(a hybrid logical clock, https://cse.buffalo.edu/tech-reports/2014-04.pdf). So neither a replayed message nor its
position in the log brings an old announcement back.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from pydantic import TypeAdapter, ValidationError

from omnidraft.errors import BusError, ConfigError, OffsetOutOfRange, SignatureRefused, WireError
from omnidraft.fleet.accepted_announcements import AcceptedAnnouncements
from omnidraft.fleet.control_log import parse_announcement, parse_payload, subject
from omnidraft.ports import Announcement, AnnouncementKind, LogReader, LogWriter, Message, Outgoing
from omnidraft.snapshots.keys import PrivateKey, Role, TrustedKeys

HEADER = "signatures"
PAYLOAD_TYPE = "application/vnd.omnidraft.announcement+json"
SCAN_TIMEOUT_S = 30.0
SCAN_MESSAGES = 1000

_SIGNERS: Mapping[str, tuple[Role, ...]] = {
    "champion": ("controller", "operator"),
    "canary": ("controller", "operator"),
    "drift": ("controller", "operator"),
    "drift_over": ("controller", "operator"),
    "rewind": ("controller", "operator"),
    "best": ("distiller", "operator"),
}
_OPERATOR: tuple[Role, ...] = ("operator",)
_SERVING = ("champion", "canary")
"""What names a snapshot to serve: bound to its digest, and limited in age."""

_SIGNATURES = TypeAdapter(dict[str, str])

logger = logging.getLogger(__name__)


def signers(kind: AnnouncementKind) -> tuple[Role, ...]:
    """Return the roles that may announce this; an operator's alone unless another is named."""
    return _SIGNERS.get(kind, _OPERATOR)


def open_signed(payload: bytes, signatures: Mapping[str, str], trusted_keys: TrustedKeys) -> Announcement:
    """Return the announcement in a signed payload.

    Raises:
        SignatureRefused: nobody who may announce this signed it.
        WireError: it is no announcement.
    """
    announcement = parse_payload(payload)
    if not signatures:
        raise SignatureRefused("it has no signature, and registry.trusted_keys asks for one")
    trusted_keys.verify(payload, PAYLOAD_TYPE, signatures, signers(announcement.kind))
    if announcement.issued_ms is None or (announcement.kind in _SERVING and announcement.digest is None):
        raise SignatureRefused("it was signed without its time, or without the digest of its snapshot")
    return announcement


def content(announcement: Announcement) -> str:
    """Return what it says, without when it was said."""
    timeless = replace(announcement, sequence=0, issued_ms=None, reason=None, fence=None, target=None, drafter=None)
    said = {name: value for name, value in asdict(timeless).items() if value is not None}
    return json.dumps(said, sort_keys=True)


class Authenticator:
    """Tells genuine announcements from others, for the followers of one pair.

    Args:
        accepted: None remembers nothing, for what only looks.
        scope: names the pair in `accepted`.
        max_age_s: the age from which a champion or canary is refused.
    """

    def __init__(
        self,
        trusted_keys: TrustedKeys,
        accepted: AcceptedAnnouncements | None,
        *,
        scope: str,
        max_age_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._trusted_keys, self._accepted = trusted_keys, accepted
        self._scope, self._max_age_s, self._clock = scope, max_age_s, clock

    def authenticate(self, message: Message) -> Announcement:
        """Return the announcement in a message. Raises WireError, as SignatureRefused when nobody who may signed it."""
        parse_announcement(message)  # damage first
        return open_signed(message.value, _signatures_of(message), self._trusted_keys)

    def accept(self, announcement: Announcement) -> None:
        """Remember an announcement in force. Raises SignatureRefused when it is older than allowed, or than what was
        accepted before."""
        if announcement.kind in _SERVING:
            require_fresh(announcement, self._max_age_s, self._clock())
        if self._accepted is None:
            return
        own, said = subject_key(self._scope, announcement), content(announcement)
        self._accepted.check(own, announcement.sequence, said)
        self._accepted.record(own, announcement.sequence, said)
        if announcement.kind == "champion":
            self._accepted.record(champion_key(self._scope), announcement.sequence, said)


def subject_key(scope: str, announcement: Announcement) -> str:
    """Return the subject of AcceptedAnnouncements that it is about."""
    about, tenant, work = subject(announcement)
    return f"{scope} {about if work is None else f'{about}/{work}'} {tenant or ''}".rstrip()


def champion_key(scope: str) -> str:
    """Return the subject of the champion alone, which a canary does not supersede."""
    return f"{scope} champion"


def require_fresh(announcement: Announcement, max_age_s: float, now_s: float) -> None:
    """Raise SignatureRefused when it was signed longer ago than allowed."""
    age_s = now_s - (announcement.issued_ms or 0) / 1000
    if age_s > max_age_s:
        raise SignatureRefused(
            f"it was signed {age_s / 3600:.1f} hours ago, more than {max_age_s / 3600:.0f}; the "
            "controller announces the champion again: see that it runs, and that clocks agree"
        )


class SignedLog:
    """The signed announcements of the control log, read to its end on each call: who signs next goes on behind them.

    Args:
        open_reader: opens a reader of the control topic; called once, when it is first needed.
    """

    def __init__(self, open_reader: Callable[[], LogReader], trusted_keys: TrustedKeys) -> None:
        self._open_reader, self._trusted_keys = open_reader, trusted_keys
        self._reader: LogReader | None = None
        self._next: dict[int, int] = {}
        self._newest = 0
        self._champions: dict[tuple[str | None, str | None], Announcement] = {}

    def newest_sequence(self) -> int:
        """Return the highest sequence, 0 without any. Raises BusError."""
        self._read()
        return self._newest

    def champion(self, target: str, drafter: str) -> Announcement | None:
        """Return the newest announcement of this pair's champion. Raises BusError."""
        self._read()
        found = [self._champions.get(pair) for pair in ((target, drafter), (None, None))]
        return max((each for each in found if each), key=lambda each: each.sequence, default=None)

    def close(self) -> None:
        """Close the reader."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self) -> None:
        if self._reader is None:
            self._reader = self._open_reader()
            self._reader.seek(self._next)
        try:
            self._read_to_end(self._reader)
        except OffsetOutOfRange:
            self._reader.seek({})
            self._next = {}
            self._read_to_end(self._reader)

    def _read_to_end(self, reader: LogReader) -> None:
        ends, deadline = reader.end_offsets(), time.monotonic() + SCAN_TIMEOUT_S
        while any(self._next.get(partition, 0) < end for partition, end in ends.items()):
            polled = reader.poll(SCAN_MESSAGES, 1.0)
            self._next |= polled.next_offsets
            for message in polled.messages:
                self._take(message)
            if not polled.next_offsets and time.monotonic() > deadline:
                raise BusError(f"the control log could not be read to its end within {SCAN_TIMEOUT_S:.0f} s; try again")

    def _take(self, message: Message) -> None:
        try:
            announcement = open_signed(message.value, _signatures_of(message), self._trusted_keys)
        except WireError:
            return
        self._newest = max(self._newest, announcement.sequence)
        pair = (announcement.target, announcement.drafter)
        if announcement.kind == "champion":
            known = self._champions.get(pair)
            if known is None or known.sequence < announcement.sequence:
                self._champions[pair] = announcement


class AnnouncementSigner:
    """Signs announcements with the private key of this process."""

    def __init__(
        self,
        private_key: PrivateKey | None,
        trusted_keys: TrustedKeys,
        log: SignedLog,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Without a private key every announcement is a ConfigError."""
        self._private_key, self._trusted_keys, self._log, self._clock = private_key, trusted_keys, log, clock
        self._last = 0

    def sign(self, value: bytes) -> tuple[bytes, dict[str, str]]:
        """Return the payload of an announcement in JSON, and its signatures.

        Raises:
            ConfigError: there is no private key, or it may not sign this kind.
        """
        wire = json.loads(value)
        if self._private_key is None:
            raise ConfigError(
                "announcements are signed where registry.trusted_keys is set: give this process registry.private_key, "
                f"that of {' or '.join(signers(wire['kind']))}"
            )
        self._trusted_keys.require_role(self._private_key, signers(wire["kind"]))
        issued_ms = int(self._clock() * 1000)
        self._last = max(issued_ms, self._newest_sequence() + 1, self._last + 1)
        payload = json.dumps(wire | {"sequence": self._last, "issued_ms": issued_ms}).encode()
        return payload, {self._private_key.key_id: self._private_key.sign(payload, PAYLOAD_TYPE)}

    def _newest_sequence(self) -> int:
        """Return the newest sequence in the log; while the log is away the clock alone decides, so that an operator can
        still promote in the registry, which workers poll."""
        try:
            return self._log.newest_sequence()
        except BusError as exc:
            logger.warning("signing by this machine's clock alone, the control log is away: %s", exc)
            return 0

    def close(self) -> None:
        """Close the reader of the control log."""
        self._log.close()


class SigningWriter:
    """Implements ports.LogWriter: signs every announcement on its way to the control topic."""

    def __init__(self, writer: LogWriter, signer: AnnouncementSigner) -> None:
        self._writer, self._signer = writer, signer

    def append(self, messages: Sequence[Outgoing]) -> None:
        """See ports.LogWriter. Raises ConfigError when this process may not announce one of them."""
        self._writer.append([self._signed(message) for message in messages])

    def close(self) -> None:
        self._writer.close()
        self._signer.close()

    def _signed(self, message: Outgoing) -> Outgoing:
        payload, signatures = self._signer.sign(message.value)
        header = {HEADER: json.dumps(signatures).encode()}
        return replace(message, value=payload, headers={**message.headers, **header})


def _signatures_of(message: Message) -> dict[str, str]:
    try:
        return _SIGNATURES.validate_json(message.headers.get(HEADER, b"{}"))
    except ValidationError as exc:
        raise SignatureRefused(f"its header {HEADER} holds no signatures") from exc
