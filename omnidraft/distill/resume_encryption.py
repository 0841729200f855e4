"""Encryption of the records in the resume part of a snapshot, and of tenants' factors, each with its tenant's key.

So a key that is destroyed makes a tenant's records and factors unreadable in every version and every copy. An encrypted
tensor has the id of its key at the end of its name: `held_out.000003.<key id>`.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from omnidraft.distill.resume_tensors import RECORD_NAME, record_of, tensor_of_bytes, tensor_to_bytes
from omnidraft.errors import ConfigError, RecordForgotten, UnknownKey
from omnidraft.ports import RecordCipher
from omnidraft.snapshots.tenant_factors import FACTORS_NAME, from_tensor

_ENCRYPTED = re.compile(rf"(?P<name>{RECORD_NAME}|{FACTORS_NAME})\.(?P<key_id>[0-9a-f]+)")


def encrypt_records(tensors: Mapping[str, Tensor], cipher: RecordCipher) -> dict[str, Tensor]:
    """Return the tensors with their records and factors encrypted. Raises KeyStoreError."""
    encrypted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tenant = _tenant_of(name, tensors)
        if tenant is None:
            encrypted[name] = tensor
            continue
        key_id, token = cipher.encrypt(tenant, tensor_to_bytes(tensor))
        encrypted[f"{name}.{key_id}"] = tensor_of_bytes(token)
    return encrypted


def _tenant_of(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the tenant whose record or whose factors this tensor is; None if it is nobody's."""
    if re.fullmatch(FACTORS_NAME, name):
        return from_tensor(tensors[name]).tenant
    return record_of(tensors[name], tensors).tenant if re.fullmatch(RECORD_NAME, name) else None


def decrypt_records(tensors: Mapping[str, Tensor], cipher: RecordCipher | None) -> tuple[dict[str, Tensor], int]:
    """Return the tensors with their records and factors decrypted, and the number of those left out as their key is
    destroyed.

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
            raise ConfigError(f"the snapshot has encrypted records or factors: {exc}; {advice}") from exc
    return decrypted, num_forgotten


def _decrypted(tensor: torch.Tensor, key_id: str, cipher: RecordCipher | None) -> Tensor:
    if cipher is None:
        raise UnknownKey("there is no key store")
    return tensor_of_bytes(cipher.decrypt(key_id, tensor_to_bytes(tensor)))
