"""Encryption at rest: the stored bytes, the keys that decrypt them, and messages that no key decrypts."""

import base64

import pytest
from cryptography.fernet import Fernet

from omnidraft.bus.encryption import EncryptedReader, EncryptedWriter, new_key
from omnidraft.ports import Message, Outgoing
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter

PLAIN = b"the user's own words"


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


def write(log: MemoryLog, message: Outgoing, *keys: str, sealed: tuple[str, ...] = ()) -> None:
    EncryptedWriter(MemoryWriter(log, "t"), keys, sealed_prefixes=sealed).append([message])


def read(log: MemoryLog, *keys: str) -> list[Message]:
    reader, messages_read = EncryptedReader(MemoryReader(log, "t"), keys), []
    while messages := reader.poll(10, timeout_s=0).messages:
        messages_read += messages
    return messages_read


def stored(log: MemoryLog) -> list[Message]:
    return list(log.topic("t")[0])


def test_what_is_stored_is_closed_and_says_so_and_the_rest_stays_readable(log):
    key = new_key()
    for _ in range(2):
        write(log, Outgoing(b"key", PLAIN, {"schema": b"omnidraft.trace"}), key)
    message, equal = stored(log)
    assert message.value != equal.value
    assert PLAIN not in message.value
    assert Fernet(key).decrypt(base64.urlsafe_b64encode(message.value)) == PLAIN
    assert (message.key, message.headers) == (b"key", {"schema": b"omnidraft.trace", "encryption": b"fernet"})
    assert len(message.value) < len(PLAIN) + 80


def test_sealed_headers_are_closed_with_the_value(log):
    key, headers = new_key(), {"reason": b"unreadable", "error": PLAIN, "original.x": PLAIN}
    write(log, Outgoing(b"key", PLAIN, headers), key, sealed=("error", "original."))
    (message,) = stored(log)
    assert sorted(message.headers) == ["encryption", "reason", "sealed.error", "sealed.original.x"]
    assert all(PLAIN not in value for value in message.headers.values())
    assert dict(read(log, key)[0].headers) == headers


def test_a_new_key_in_front_writes_and_the_old_one_still_reads(log):
    old, new = new_key(), new_key()
    write(log, Outgoing(b"a", b"before"), old)
    write(log, Outgoing(b"b", b"after"), new, old)
    assert [message.value for message in read(log, new, old)] == [b"before", b"after"]
    assert [message.headers.get("encryption") for message in read(log, new)] == [b"fernet", None]
    assert [message.headers.get("encryption") for message in read(log, old)] == [None, b"fernet"]


def test_a_log_that_was_begun_in_plain_text_is_read_on(log):
    key = new_key()
    MemoryWriter(log, "t").append([Outgoing(b"a", b"plain", {"schema": b"x"})])
    write(log, Outgoing(b"b", b"closed"), key)
    assert [message.value for message in read(log, key)] == [b"plain", b"closed"]


@pytest.mark.parametrize("harm", [lambda v: v[:-1], lambda v: v[:20], lambda v: b"", lambda v: v[:-1] + b"\x00\x01"])
def test_a_message_that_was_changed_in_the_log_is_handed_on_closed_and_the_next_is_read(log, harm):
    key = new_key()
    write(log, Outgoing(b"a", PLAIN), key)
    (message,) = stored(log)
    MemoryWriter(log, "t").append([Outgoing(b"a", harm(message.value), message.headers)])
    write(log, Outgoing(b"b", b"next"), key)
    values = [(message.value, "encryption" in message.headers) for message in read(log, key)]
    assert values == [(PLAIN, False), (harm(message.value), True), (b"next", False)]


def test_a_closed_message_that_is_written_again_is_not_closed_twice(log):
    lost, key = new_key(), new_key()
    write(log, Outgoing(b"a", PLAIN), lost)
    (closed,) = read(log, key)
    write(log, Outgoing(closed.key, closed.value, closed.headers), key)
    assert [message.value for message in read(log, key, lost)] == [PLAIN, PLAIN]


@pytest.mark.parametrize("headers", [{"encryption": b"rot13"}, {"encryption": b"fernet"}, {"sealed.x": b"y"}])
def test_headers_that_a_stranger_wrote_are_no_error(log, headers):
    MemoryWriter(log, "t").append([Outgoing(b"a", b"value", headers)])
    (message,) = read(log, new_key())
    assert (message.value, dict(message.headers)) == (b"value", headers)
