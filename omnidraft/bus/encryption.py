"""Encryption at rest: what a topic holds is closed before it is written and opened after it was read.

Algorithm: Fernet (AES-128-CBC, HMAC-SHA256), the bytes of its token without their base64, which is a third longer.
A closed message says so in the header `encryption`; headers that are closed too have the prefix `sealed.`. Key,
partition and all other headers stay readable. A message without that header was never closed and passes as it is, both
ways. One that no key opens is handed on closed: whoever decodes it sees the header and refuses it.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from omnidraft.ports import LogReader, LogWriter, Message, Offsets, Outgoing, PollResult
from omnidraft.traces.schema import ENCRYPTION

ALGORITHM = b"fernet"
SEALED = "sealed."


def new_key() -> str:
    """A fresh key in URL-safe base64."""
    return Fernet.generate_key().decode()


class _Lock:
    """Closes with the first key, opens with any."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._fernet = MultiFernet([Fernet(key) for key in keys])

    def close(self, plain: bytes) -> bytes:
        return base64.urlsafe_b64decode(self._fernet.encrypt(plain))

    def open(self, closed: bytes) -> bytes:
        """Raises InvalidToken."""
        return self._fernet.decrypt(base64.urlsafe_b64encode(closed))


class EncryptedWriter:
    """LogWriter that closes what it hands on. A message that is closed already is handed on as it is."""

    def __init__(self, writer: LogWriter, keys: Sequence[str], *, sealed: tuple[str, ...] = ()) -> None:
        """
        Args:
            keys: newest first, at least one.
            sealed: beginnings of the names of headers that are closed too.
        """
        self._writer, self._lock, self._sealed = writer, _Lock(keys), sealed

    def append(self, messages: Sequence[Outgoing]) -> None:
        self._writer.append([self._closed(message) for message in messages])

    def close(self) -> None:
        self._writer.close()

    def _closed(self, message: Outgoing) -> Outgoing:
        if ENCRYPTION in message.headers:
            return message
        headers = dict(self._closed_header(name, value) for name, value in message.headers.items())
        return replace(message, value=self._lock.close(message.value), headers={**headers, ENCRYPTION: ALGORITHM})

    def _closed_header(self, name: str, value: bytes) -> tuple[str, bytes]:
        return (SEALED + name, self._lock.close(value)) if name.startswith(self._sealed) else (name, value)


class EncryptedReader:
    """LogReader that opens what it is handed."""

    def __init__(self, reader: LogReader, keys: Sequence[str]) -> None:
        self._reader, self._lock = reader, _Lock(keys)

    def partitions(self) -> tuple[int, ...]:
        return self._reader.partitions()

    def seek(self, offsets: Offsets) -> None:
        self._reader.seek(offsets)

    def seek_back(self, num_messages: int) -> None:
        self._reader.seek_back(num_messages)

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        polled = self._reader.poll(max_messages, timeout_s)
        return replace(polled, messages=tuple(self._opened(message) for message in polled.messages))

    def first_offsets(self) -> Offsets:
        return self._reader.first_offsets()

    def identity(self) -> str:
        return self._reader.identity()

    def end_offsets(self) -> Offsets:
        return self._reader.end_offsets()

    def close(self) -> None:
        self._reader.close()

    def _opened(self, message: Message) -> Message:
        if message.headers.get(ENCRYPTION) != ALGORITHM:
            return message
        try:
            return replace(message, value=self._lock.open(message.value), headers=self._opened_headers(message.headers))
        except InvalidToken:
            return message

    def _opened_headers(self, headers: Mapping[str, bytes]) -> dict[str, bytes]:
        """Raises InvalidToken."""
        return {
            name.removeprefix(SEALED): self._lock.open(value) if name.startswith(SEALED) else value
            for name, value in headers.items()
            if name != ENCRYPTION
        }
