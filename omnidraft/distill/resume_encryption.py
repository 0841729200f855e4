"""Encryption of the records in the resume part of a snapshot, each with its tenant's key.

So a key that is destroyed makes a tenant's records unreadable in every version and every copy. An encrypted record's
tensor has the id of its key at the end of its name: `held_out.000003.<key id>`.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from omnidraft.distill.resume_tensors import RECORD_NAME, record_of, tensor_of_bytes, tensor_to_bytes
from omnidraft.errors import ConfigError, RecordForgotten, UnknownKey
from omnidraft.ports import RecordCipher

_ENCRYPTED = re.compile(rf"(?P<name>{RECORD_NAME})\.(?P<key_id>[0-9a-f]+)")


def encrypt_records(tensors: Mapping[str, Tensor], cipher: RecordCipher) -> dict[str, Tensor]:
    """Return the tensors with their records encrypted. Raises KeyStoreError."""
    encrypted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if re.fullmatch(RECORD_NAME, name) is None:
            encrypted[name] = tensor
            continue
        key_id, token = cipher.encrypt(record_of(tensor, tensors).tenant, tensor_to_bytes(tensor))
        encrypted[f"{name}.{key_id}"] = tensor_of_bytes(token)
    return encrypted


def decrypt_records(tensors: Mapping[str, Tensor], cipher: RecordCipher | None) -> tuple[dict[str, Tensor], int]:
    """Return the tensors with their records decrypted, and the number of records left out as their key is destroyed.

    Raises:
        ConfigError: a record's key is not known.
        KeyStoreError: the key store does not answer.
    """
    decrypted: dict[str, Tensor] = {}
    num_forgotten = 0
    for name, tensor in tensors.items():
        found = _ENCRYPTED.fullmatch(name)
        if found is None:
            decrypted[name] = tensor
            continue
        try:
            decrypted[found["name"]] = _decrypted(tensor, found["key_id"], cipher)
        except RecordForgotten:
            num_forgotten += 1
        except UnknownKey as exc:
            advice = "set log.encryption_keys and log.key_store as they were when the snapshot was published"
            raise ConfigError(f"the newest snapshot has encrypted records: {exc}; {advice}") from exc
    return decrypted, num_forgotten


def _decrypted(tensor: torch.Tensor, key_id: str, cipher: RecordCipher | None) -> Tensor:
    if cipher is None:
        raise UnknownKey("there is no key store")
    return tensor_of_bytes(cipher.decrypt(key_id, tensor_to_bytes(tensor)))
