"""Fernet tokens as bytes, without their base64, which is a third longer and costs more than the encryption itself.

A token is 0x80, the seconds since 1970 in 8 bytes, an IV of 16 bytes, the text in AES-128-CBC with PKCS 7 padding, and
the HMAC-SHA256 of all that. Source: https://github.com/fernet/spec/blob/master/Spec.md
"""

import base64
import binascii
import os
import time

from cryptography.exceptions import InvalidSignature
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC

_VERSION = b"\x80"
_TIME_BYTES, _BLOCK_BYTES, _HMAC_BYTES, _KEY_BYTES = 8, 16, 32, 32
_HEAD_BYTES = len(_VERSION) + _TIME_BYTES + _BLOCK_BYTES


class FernetBytes:
    """One key, which encrypts and decrypts."""

    def __init__(self, key: str) -> None:
        """Raises ValueError unless the key is 32 bytes in URL-safe base64."""
        try:
            decoded = base64.urlsafe_b64decode(key)
        except binascii.Error as exc:
            raise ValueError("a key is 32 bytes in URL-safe base64") from exc
        if len(decoded) != _KEY_BYTES:
            raise ValueError(f"a key is 32 bytes in URL-safe base64, not {len(decoded)}")
        self._signing_key, self._aes = decoded[:16], algorithms.AES(decoded[16:])

    def encrypt(self, plain: bytes) -> bytes:
        """Return a token."""
        iv = os.urandom(_BLOCK_BYTES)
        encryptor = Cipher(self._aes, modes.CBC(iv)).encryptor()
        num_padding = _BLOCK_BYTES - len(plain) % _BLOCK_BYTES
        head = _VERSION + int(time.time()).to_bytes(_TIME_BYTES, "big") + iv
        parts = [head, encryptor.update(plain), encryptor.update(bytes([num_padding]) * num_padding)]
        signature = HMAC(self._signing_key, SHA256())
        for part in parts:
            signature.update(part)
        return b"".join([*parts, signature.finalize()])

    def decrypt(self, token: bytes) -> bytes:
        """Return what a token holds. Raises InvalidToken when this key did not make it, or it was changed."""
        content, signature = memoryview(token)[:-_HMAC_BYTES], token[-_HMAC_BYTES:]
        num_encrypted = len(content) - _HEAD_BYTES
        if token[:1] != _VERSION or num_encrypted < _BLOCK_BYTES or num_encrypted % _BLOCK_BYTES:
            raise InvalidToken
        expected = HMAC(self._signing_key, SHA256())
        expected.update(content)
        try:
            expected.verify(signature)
        except InvalidSignature as exc:
            raise InvalidToken from exc
        iv = bytes(content[_HEAD_BYTES - _BLOCK_BYTES : _HEAD_BYTES])
        padded = Cipher(self._aes, modes.CBC(iv)).decryptor().update(content[_HEAD_BYTES:])
        num_padding = padded[-1]
        if not 1 <= num_padding <= _BLOCK_BYTES or padded[-num_padding:] != bytes([num_padding]) * num_padding:
            raise InvalidToken
        return padded[:-num_padding]
