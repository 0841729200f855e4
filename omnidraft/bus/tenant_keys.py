"""Data keys of tenants: made, wrapped and opened with the master keys, and found by the opaque ids in messages.

A wrapped key names its id and its tenant, so that rows of the store cannot be exchanged unnoticed.
Keys are looked up again after CACHE_S: that is how long a process may go on using one that was destroyed, unless it
clears the cache.
Without a key store the master keys take their place, under the id MASTER_KEY_ID.
"""

import base64
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from cachetools import TTLCache
from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from omnidraft.bus.key_store import KeyStore, StoredKey
from omnidraft.errors import RecordForgotten, UnknownKey, WireError

CACHE_S = 10.0
MAX_CACHED = 10_000
_ID_BYTES = 16
_KEY_ID = re.compile(rf"[0-9a-f]{{{2 * _ID_BYTES}}}")
MASTER_KEY_ID = "00" * _ID_BYTES
"""The id of all master keys, where a record outside the log needs one."""


class Cipher:
    """Encrypts with the first key and decrypts with any. Tokens are Fernet's without their base64, which is a third
    longer."""

    def __init__(self, keys: Sequence[str]) -> None:
        """`keys`: 32 bytes in URL-safe base64 each."""
        self._fernet = MultiFernet([Fernet(key) for key in keys])

    def encrypt(self, plain: bytes) -> bytes:
        return base64.urlsafe_b64decode(self._fernet.encrypt(plain))

    def decrypt(self, token: bytes) -> bytes:
        """Raises InvalidToken when none of the keys made the token, or it was changed."""
        return self._fernet.decrypt(base64.urlsafe_b64encode(token))


class MasterKeys:
    """Implements ports.RecordCipher without a key store: no tenant has a key of its own."""

    def __init__(self, master_keys: Sequence[str]) -> None:
        """`master_keys`: newest first, at least one."""
        self._master = Cipher(master_keys)

    def encrypt(self, tenant: str, plain: bytes) -> tuple[str, bytes]:
        """See ports.RecordCipher."""
        return MASTER_KEY_ID, self._master.encrypt(plain)

    def forgotten_ms(self, tenants: Collection[str]) -> dict[str, int]:
        """See ports.RecordCipher."""
        return {}

    def decrypt(self, key_id: str, token: bytes) -> bytes:
        """See ports.RecordCipher."""
        if key_id != MASTER_KEY_ID:
            raise UnknownKey(f"key {key_id} is in a key store, and log.key_store names none")
        try:
            return self._master.decrypt(token)
        except InvalidToken as exc:
            raise UnknownKey("it was changed, or encrypted with a key that is not among log.encryption_keys") from exc

    def clear_cache(self) -> None:
        """See ports.RecordCipher."""


class TenantKeys:
    """Implements ports.RecordCipher on a key store. One thread."""

    def __init__(
        self, store: KeyStore, master_keys: Sequence[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`master_keys`: newest first, at least one."""
        self._store, self._master = store, Cipher(master_keys)
        self._id_of: TTLCache[str, str] = TTLCache(MAX_CACHED, CACHE_S, clock)
        self._found: TTLCache[str, Cipher | WireError] = TTLCache(MAX_CACHED, CACHE_S, clock)
        """The ciphers of keys, or the reasons why there are none."""

    def current(self, tenant: str) -> tuple[str, Cipher]:
        """Return the id and cipher of the key to encrypt with. A tenant without one gets one. Raises KeyStoreError."""
        key_id = self._id_of.get(tenant)
        found = None if key_id is None else self._found.get(key_id)
        if key_id is None or not isinstance(found, Cipher):
            key_id, found = self._newest(tenant) or self._make(tenant)
            self._id_of[tenant], self._found[key_id] = key_id, found
        return key_id, found

    def cipher(self, key_id: str) -> Cipher:
        """Return the cipher of a key.

        Raises:
            RecordForgotten: the key was destroyed.
            UnknownKey: the store does not know it, or no master key opens it.
            KeyStoreError: the store does not answer.
        """
        if not _KEY_ID.fullmatch(key_id):
            raise UnknownKey(f"{key_id!r:.80} is no id of a key")
        found = self._found.get(key_id) or self._look_up([key_id])[key_id]
        if isinstance(found, Cipher):
            return found
        raise type(found)(*found.args)

    def look_up(self, key_ids: Iterable[str]) -> None:
        """Look these keys up together, so that what follows need not ask for each. What is no id is in no store, which
        may not even take it for a text. Raises KeyStoreError."""
        if wanted := sorted({each for each in key_ids if each not in self._found and _KEY_ID.fullmatch(each)}):
            self._look_up(wanted)

    def encrypt(self, tenant: str, plain: bytes) -> tuple[str, bytes]:
        """See ports.RecordCipher."""
        key_id, cipher = self.current(tenant)
        return key_id, cipher.encrypt(plain)

    def forgotten_ms(self, tenants: Collection[str]) -> dict[str, int]:
        """See ports.RecordCipher."""
        return self._store.destroyed_ms(tenants)

    def decrypt(self, key_id: str, token: bytes) -> bytes:
        """See ports.RecordCipher. What MasterKeys encrypted can be decrypted, too."""
        try:
            return (self._master if key_id == MASTER_KEY_ID else self.cipher(key_id)).decrypt(token)
        except InvalidToken as exc:
            raise UnknownKey(f"key {key_id} does not open it: it was changed, or encrypted with another key") from exc

    def clear_cache(self) -> None:
        """See ports.RecordCipher."""
        self._id_of.clear()
        self._found.clear()

    def count(self) -> tuple[int, int, int]:
        """Return the numbers of keys that open, that no master key opens, and that are destroyed. Raises
        KeyStoreError."""
        opened = [self._open(stored.key_id, stored) for stored in self._store.all_keys()]
        num_open = sum(isinstance(each, Cipher) for each in opened)
        num_destroyed = sum(isinstance(each, RecordForgotten) for each in opened)
        return num_open, len(opened) - num_open - num_destroyed, num_destroyed

    def rewrap(self) -> tuple[int, int]:
        """Wrap every key with the newest master key; return the numbers of keys done and of keys that no master key
        opens. Raises KeyStoreError."""
        num_done = num_closed = 0
        for stored in self._store.all_keys():
            if stored.wrapped is None:
                continue
            try:
                wrapped = self._master.encrypt(self._master.decrypt(stored.wrapped))
            except InvalidToken:
                num_closed += 1
                continue
            self._store.replace(stored, wrapped)
            num_done += 1
        return num_done, num_closed

    def _look_up(self, key_ids: Sequence[str]) -> dict[str, Cipher | WireError]:
        stored = self._store.get(key_ids)
        found = {key_id: self._open(key_id, stored.get(key_id)) for key_id in key_ids}
        self._found.update(found)
        return found

    def _newest(self, tenant: str) -> tuple[str, Cipher] | None:
        """Return the tenant's newest key that a master key opens; None without one."""
        for stored in reversed(self._store.of_tenant(tenant)):
            if isinstance(cipher := self._open(stored.key_id, stored), Cipher):
                return stored.key_id, cipher
        return None

    def _make(self, tenant: str) -> tuple[str, Cipher]:
        """Store a new key; it is there before anything is encrypted with it."""
        key_id, key = secrets.token_hex(_ID_BYTES), Fernet.generate_key().decode()
        plain = json.dumps({"key_id": key_id, "tenant": tenant, "key": key}).encode()
        self._store.add(StoredKey(key_id, tenant, self._master.encrypt(plain)))
        return key_id, Cipher([key])

    def _open(self, key_id: str, stored: StoredKey | None) -> Cipher | WireError:
        """Return the key, or the reason why there is none."""
        if stored is None:
            return UnknownKey(f"the key store has no key {key_id}; is log.key_store the one that it was written with?")
        if stored.wrapped is None:
            return RecordForgotten(f"key {key_id} was destroyed: its tenant was forgotten")
        try:
            plain = json.loads(self._master.decrypt(stored.wrapped))
        except InvalidToken:
            return UnknownKey(f"key {key_id} is wrapped with a key that is not among log.encryption_keys")
        if (plain["key_id"], plain["tenant"]) != (stored.key_id, stored.tenant):
            return UnknownKey(f"key {key_id} is wrapped for another tenant: the key store was changed")
        return Cipher([plain["key"]])
