"""The messages of one tenant in a topic: trace records and dead letters, readable or not."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from omnidraft.distill.ingest.dead_letters import ORIGINAL
from omnidraft.errors import WireError
from omnidraft.ports import Message
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from omnidraft.traces.schema import ENCRYPTION, FORGOTTEN, KEY_ID


@dataclass(slots=True)
class TenantMessages:
    """The messages of one tenant that a scan of a topic found."""

    positions: list[tuple[int, int]] = field(default_factory=list)
    """(partition, offset) of every message of the tenant, those without content too."""
    num_readable: int = 0
    """Those that have content which can be read."""
    num_with_master_key: int = 0
    """Of these, those that no key of the tenant protects: plain, or encrypted with a master key."""
    num_unopened: int = 0
    """Encrypted messages that no key here opens, and that name no stored key: they may be anybody's."""
    newest_ms: int = 0
    """The time of the newest, Unix milliseconds: by the log's clock or, if that is later, by its worker's, as far as
    records can be read."""

    @property
    def first_offsets(self) -> dict[int, int]:
        """Partition -> offset of the tenant's first message there."""
        return dict(sorted(self.positions, reverse=True))


def mark(tenant: str) -> bytes:
    """Return what stays of a message whose content was deleted, so that deleting can be repeated: a hash of the
    tenant's name."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32].encode()


class TenantMatcher:
    """Tells the messages of one tenant, decrypted as far as keys are known, from those of others."""

    def __init__(self, tenant: str, key_ids: Collection[str], *, other_key_ids: Collection[str] = ()) -> None:
        """`key_ids`: of all keys that the tenant ever had; `other_key_ids`: of those of others."""
        self._tenant, self._mark = tenant, mark(tenant)
        self._key_ids = {key_id.encode() for key_id in key_ids}
        self._known_ids = self._key_ids | {key_id.encode() for key_id in other_key_ids}
        name = tenant.encode()
        self._avro_text = _avro_length(len(name)) + name

    def find(self, messages: Iterable[Message]) -> TenantMessages:
        """Return the tenant's among these messages. Raises whatever reading them raises."""
        found = TenantMessages()
        for message in messages:
            record = _record(message)
            if not self._is_of_tenant(message, record):
                found.num_unopened += _is_closed(message) and self._known_ids.isdisjoint(_key_ids(message))
                continue
            found.positions.append((message.partition, message.offset))
            found.newest_ms = max(found.newest_ms, message.timestamp_ms, record.time_ms if record else 0)
            if FORGOTTEN not in message.headers and not _is_closed(message):
                found.num_readable += 1
                found.num_with_master_key += message.headers.get(KEY_ID) not in self._key_ids
        return found

    def _is_of_tenant(self, message: Message, record: TraceRecord | None) -> bool:
        if message.headers.get(FORGOTTEN) == self._mark or not self._key_ids.isdisjoint(_key_ids(message)):
            return True
        if record is not None:
            return record.tenant == self._tenant
        if _is_closed(message):
            return False  # any bytes may stand in what is encrypted
        return self._avro_text in message.value  # damaged: take what names the tenant as a record does


def _is_closed(message: Message) -> bool:
    """Return whether its value is encrypted: no key opened it, or it is a dead letter that copied such a one."""
    return ENCRYPTION in message.headers or ORIGINAL + ENCRYPTION in message.headers


def _key_ids(message: Message) -> list[bytes]:
    """Return the ids of the keys that it was encrypted with, as a dead letter also its original's."""
    return [message.headers[name] for name in (KEY_ID, ORIGINAL + KEY_ID) if name in message.headers]


def _record(message: Message) -> TraceRecord | None:
    """Return the record in a message or dead letter, None when it cannot be read."""
    headers = {name.removeprefix(ORIGINAL): value for name, value in message.headers.items()}
    try:
        return codec.decode(message.value, headers)
    except WireError:
        return None


def _avro_length(length: int) -> bytes:
    """Return the length of a text as Avro writes it: zigzag, 7 bits a byte."""
    number, encoded = length << 1, bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
