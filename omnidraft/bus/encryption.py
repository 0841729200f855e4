"""Encryption at rest: messages are encrypted before they are written and decrypted after they were read.

Algorithm: Fernet (AES-128-CBC, HMAC-SHA256), the bytes of its token without their base64, which is a third longer.
An encrypted message says so in the header `encryption`; encrypted headers have the prefix `sealed.`. Key, partition and
all other headers stay plain. A message without that header was never encrypted and passes unchanged, both ways. One
that no key decrypts is passed on encrypted: whoever decodes it sees the header and refuses it.
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
    """Return a new key in URL-safe base64."""
    return Fernet.generate_key().decode()


class _Cipher:
    """Encrypts with the first key and decrypts with any."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._fernet = MultiFernet([Fernet(key) for key in keys])

    def encrypt(self, plain: bytes) -> bytes:
        return base64.urlsafe_b64decode(self._fernet.encrypt(plain))

    def decrypt(self, token: bytes) -> bytes:
        """Raises InvalidToken."""
        return self._fernet.decrypt(base64.urlsafe_b64encode(token))


class EncryptedWriter:
    """A LogWriter that encrypts messages; one that is encrypted already passes unchanged."""

    def __init__(self, writer: LogWriter, keys: Sequence[str], *, sealed_prefixes: tuple[str, ...] = ()) -> None:
        """
        Args:
            keys: newest first, at least one.
            sealed_prefixes: prefixes of the names of headers that are encrypted too.
        """
        self._writer, self._cipher, self._sealed_prefixes = writer, _Cipher(keys), sealed_prefixes

    def append(self, messages: Sequence[Outgoing]) -> None:
        self._writer.append([self._encrypt(message) for message in messages])

    def close(self) -> None:
        self._writer.close()

    def _encrypt(self, message: Outgoing) -> Outgoing:
        if ENCRYPTION in message.headers:
            return message
        headers = dict(self._encrypt_header(name, value) for name, value in message.headers.items())
        return replace(message, value=self._cipher.encrypt(message.value), headers={**headers, ENCRYPTION: ALGORITHM})

    def _encrypt_header(self, name: str, value: bytes) -> tuple[str, bytes]:
        return (SEALED + name, self._cipher.encrypt(value)) if name.startswith(self._sealed_prefixes) else (name, value)


class EncryptedReader:
    """A LogReader that decrypts messages."""

    def __init__(self, reader: LogReader, keys: Sequence[str]) -> None:
        self._reader, self._cipher = reader, _Cipher(keys)

    def partitions(self) -> tuple[int, ...]:
        return self._reader.partitions()

    def seek(self, offsets: Offsets) -> None:
        self._reader.seek(offsets)

    def seek_back(self, num_messages: int) -> None:
        self._reader.seek_back(num_messages)

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        polled = self._reader.poll(max_messages, timeout_s)
        return replace(polled, messages=tuple(self._decrypt(message) for message in polled.messages))

    def first_offsets(self) -> Offsets:
        return self._reader.first_offsets()

    def identity(self) -> str:
        return self._reader.identity()

    def end_offsets(self) -> Offsets:
        return self._reader.end_offsets()

    def close(self) -> None:
        self._reader.close()

    def _decrypt(self, message: Message) -> Message:
        if message.headers.get(ENCRYPTION) != ALGORITHM:
            return message
        try:
            return replace(
                message, value=self._cipher.decrypt(message.value), headers=self._decrypt_headers(message.headers)
            )
        except InvalidToken:
            return message

    def _decrypt_headers(self, headers: Mapping[str, bytes]) -> dict[str, bytes]:
        """Raises InvalidToken."""
        return {
            name.removeprefix(SEALED): self._cipher.decrypt(value) if name.startswith(SEALED) else value
            for name, value in headers.items()
            if name != ENCRYPTION
        }
