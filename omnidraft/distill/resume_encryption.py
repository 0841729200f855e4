"""Encryption of the records in the resume part of a snapshot, and of tenants' factors, each with its tenant's key.

So a key that is destroyed makes a tenant's records and factors unreadable in every version and every copy. Without a
key store all are encrypted with the master key. An encrypted tensor has the id of its key at the end of its name:
`held_out.000003.<key id>`.
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
    """Return the tensors with their records and factors encrypted, without those from before their tenant was
    forgotten: the order may not have come yet, and a new key would open them for good. Raises KeyStoreError."""
    encrypted: dict[str, Tensor] = {}
    origins: dict[str, tuple[str, int]] = {}
    for name, tensor in tensors.items():
        origin = _origin_of(name, tensors)
        if origin is None:
            encrypted[name] = tensor
            continue
        key_id, token = cipher.encrypt(origin[0], tensor_to_bytes(tensor))
        origins[f"{name}.{key_id}"] = origin
        encrypted[f"{name}.{key_id}"] = tensor_of_bytes(token)
    forgotten_ms = cipher.forgotten_ms({tenant for tenant, _ in origins.values()})
    for name, (tenant, time_ms) in origins.items():
        if time_ms <= forgotten_ms.get(tenant, -1):
            del encrypted[name]
    return encrypted


def _origin_of(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, int] | None:
    """Return whose record or factors this tensor is, and the time of the record, or of the oldest that the factors
    learned from; None if it is nobody's."""
    if re.fullmatch(FACTORS_NAME, name):
        factors = from_tensor(tensors[name])
        return factors.tenant, factors.since_ms
    if not re.fullmatch(RECORD_NAME, name):
        return None
    record = record_of(tensors[name], tensors)
    return record.tenant, record.time_ms


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
        raise UnknownKey("there are no keys here")
    return tensor_of_bytes(cipher.decrypt(key_id, tensor_to_bytes(tensor)))
