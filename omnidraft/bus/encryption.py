"""Encryption at rest: messages are encrypted before they are written and decrypted after they were read.

Algorithm: Fernet (AES-128-CBC, HMAC-SHA256), the bytes of its token without their base64, which is a third longer.
An encrypted message says so in the header `encryption`; encrypted headers have the prefix `sealed.`. Key, partition and
all other headers stay plain. With a key store, a tenant's data is encrypted with the tenant's own key, whose opaque id
is in the header `encryption_key_id`; everything else, and all of it without a key store, with the newest master key. A
decrypted message keeps that header, so that a copy of it gets the same key.
A message without the header `encryption` was never encrypted and passes unchanged, both ways. One that no key decrypts
is passed on encrypted: whoever decodes it sees the header and refuses it. One whose key was destroyed is passed on
empty, with the header `forgotten`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from cryptography.fernet import Fernet, InvalidToken

from omnidraft.bus.tenant_keys import Cipher, TenantKeys
from omnidraft.errors import RecordForgotten, UnknownKey
from omnidraft.ports import LogReader, LogWriter, Message, Offsets, Outgoing, PollResult
from omnidraft.traces.schema import ENCRYPTION, FORGOTTEN, KEY_ID

ALGORITHM = b"fernet"
SEALED = "sealed."


def new_key() -> str:
    """Return a new key in URL-safe base64."""
    return Fernet.generate_key().decode()


class EncryptedWriter:
    """A LogWriter that encrypts messages; one that is encrypted already passes unchanged."""

    def __init__(
        self,
        writer: LogWriter,
        keys: Sequence[str],
        *,
        sealed_prefixes: tuple[str, ...] = (),
        tenant_keys: TenantKeys | None = None,
    ) -> None:
        """
        Args:
            keys: master keys, newest first, at least one.
            sealed_prefixes: prefixes of the names of headers that are encrypted too.
            tenant_keys: the data keys of tenants; None encrypts everything with the master key.
        """
        self._writer, self._cipher, self._sealed_prefixes = writer, Cipher(keys), sealed_prefixes
        self._tenant_keys = tenant_keys

    def append(self, messages: Sequence[Outgoing]) -> None:
        """See ports.LogWriter. Raises KeyStoreError, a BusError, before anything is written."""
        self._writer.append([self._encrypt(message) for message in messages])

    def close(self) -> None:
        self._writer.close()

    def _encrypt(self, message: Outgoing) -> Outgoing:
        if ENCRYPTION in message.headers or FORGOTTEN in message.headers:
            return message
        sealed = {name: value for name, value in message.headers.items() if name.startswith(self._sealed_prefixes)}
        headers = {name: value for name, value in message.headers.items() if name not in {*sealed, KEY_ID}}
        try:
            key_id, cipher = self._key(message)
        except RecordForgotten:
            return replace(message, value=b"", headers={**headers, FORGOTTEN: b"1"})
        headers |= {SEALED + name: cipher.encrypt(value) for name, value in sealed.items()}
        headers |= {ENCRYPTION: ALGORITHM} if key_id is None else {ENCRYPTION: ALGORITHM, KEY_ID: key_id.encode()}
        return replace(message, value=cipher.encrypt(message.value), headers=headers)

    def _key(self, message: Outgoing) -> tuple[str | None, Cipher]:
        """Return the key that its original had, else its tenant's, else the master key, which has no id. Raises
        RecordForgotten, KeyStoreError."""
        if self._tenant_keys is not None and (original := message.headers.get(KEY_ID)) is not None:
            with suppress(UnknownKey):
                return (key_id := original.decode(errors="replace")), self._tenant_keys.cipher(key_id)
        if self._tenant_keys is not None and message.tenant is not None:
            return self._tenant_keys.current(message.tenant)
        return None, self._cipher


class EncryptedReader:
    """A LogReader that decrypts messages."""

    def __init__(self, reader: LogReader, keys: Sequence[str], *, tenant_keys: TenantKeys | None = None) -> None:
        """`keys`, `tenant_keys`: as the writer's; without `tenant_keys` what was encrypted with them stays so."""
        self._reader, self._cipher, self._tenant_keys = reader, Cipher(keys), tenant_keys
        self._encrypted: PollResult | None = None
        """A poll that waits for the key store."""

    def partitions(self) -> tuple[int, ...]:
        return self._reader.partitions()

    def seek(self, offsets: Offsets) -> None:
        self._reader.seek(offsets)
        self._encrypted = None

    def seek_back(self, num_messages: int) -> None:
        self._reader.seek_back(num_messages)
        self._encrypted = None

    def poll(self, max_messages: int, timeout_s: float) -> PollResult:
        """See ports.LogReader. Raises KeyStoreError, a BusError; polling again loses nothing."""
        self._encrypted = self._encrypted or self._reader.poll(max_messages, timeout_s)
        messages = self._encrypted.messages
        if self._tenant_keys is not None:
            self._tenant_keys.look_up(key_id for message in messages if (key_id := _key_id(message)) is not None)
        decrypted = replace(self._encrypted, messages=tuple(self._decrypt(message) for message in messages))
        self._encrypted = None
        return decrypted

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
            cipher = self._cipher_of(message)
            return replace(
                message, value=cipher.decrypt(message.value), headers=_decrypt_headers(cipher, message.headers)
            )
        except RecordForgotten:
            return replace(message, value=b"", headers=_without_content(message.headers))
        except (InvalidToken, UnknownKey):
            return message

    def _cipher_of(self, message: Message) -> Cipher:
        """Raises RecordForgotten, UnknownKey, KeyStoreError."""
        key_id = _key_id(message)
        if key_id is None:
            return self._cipher
        if self._tenant_keys is None:
            raise UnknownKey(f"key {key_id} is in a key store, and log.key_store names none")
        return self._tenant_keys.cipher(key_id)


def _key_id(message: Message) -> str | None:
    """Return the id of the data key that an encrypted message names."""
    named = message.headers.get(KEY_ID) if message.headers.get(ENCRYPTION) == ALGORITHM else None
    return None if named is None else named.decode(errors="replace")


def _decrypt_headers(cipher: Cipher, headers: Mapping[str, bytes]) -> dict[str, bytes]:
    """Raises InvalidToken."""
    return {
        name.removeprefix(SEALED): cipher.decrypt(value) if name.startswith(SEALED) else value
        for name, value in headers.items()
        if name != ENCRYPTION
    }


def _without_content(headers: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the headers of a message whose key was destroyed."""
    plain = {name: value for name, value in headers.items() if name != ENCRYPTION and not name.startswith(SEALED)}
    return {**plain, FORGOTTEN: b"1"}
