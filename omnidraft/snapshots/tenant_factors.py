"""The low-rank factors of one tenant as bytes in a snapshot, and the digest of the weights that they were fitted on.

They are one tensor of bytes, so that they can be encrypted with the tenant's key as its records are: in a file of the
serving part for workers, in float32 in the resume part for the learner that goes on from them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnidraft.errors import SnapshotCorrupt

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "serving/tenants/"
"""The folder of workers' files, one for each tenant whose factors serve."""
FACTORS = "factors."
"""The beginning of the names of tensors that are somebody's factors."""
FACTORS_NAME = r"factors\.\d{6}"
"""These names, as a regular expression."""
_ABOUT = "about"


@dataclass(frozen=True, slots=True)
class FittedFactors:
    """Factors of one tenant."""

    tenant: str
    version: int
    """How many times they were fitted."""
    since_ms: int
    """The time of the oldest record that they learned from, Unix milliseconds."""
    tensors: Mapping[str, "Tensor"]
    """A and B of each linear layer; see snapshots/low_rank.py."""


def file_name(tenant: str) -> str:
    """Return the name of a tenant's file, which does not show the tenant."""
    return f"{FOLDER}{hashlib.sha256(tenant.encode()).hexdigest()[:32]}.safetensors"


def tensor_name(number: int) -> str:
    """Return the name of the tensor with the factors of tenant number so many in a file."""
    return f"{FACTORS}{number:06d}"


def to_tensor(factors: FittedFactors) -> "Tensor":
    """Return the factors as a tensor of bytes."""
    import torch
    from safetensors.torch import save

    about = {"tenant": factors.tenant, "version": factors.version, "since_ms": factors.since_ms}
    description = torch.frombuffer(bytearray(json.dumps(about, sort_keys=True).encode()), dtype=torch.uint8)
    contiguous = {name: tensor.detach().contiguous() for name, tensor in factors.tensors.items()}
    return torch.frombuffer(bytearray(save(contiguous | {_ABOUT: description})), dtype=torch.uint8)


def from_tensor(tensor: "Tensor") -> FittedFactors:
    """Return what `to_tensor` got. Raises SnapshotCorrupt when it is something else."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(tensor.numpy().tobytes())
        about = json.loads(tensors.pop(_ABOUT).numpy().tobytes())
        return FittedFactors(about["tenant"], about["version"], about["since_ms"], tensors)
    except (SafetensorError, KeyError, ValueError) as exc:
        raise SnapshotCorrupt(f"a tenant's factors cannot be read: {exc}") from exc


def weights_digest(tensors: Mapping[str, "Tensor"]) -> str:
    """Return the SHA-256 of serving weights, in hex: names, formats, shapes and numbers."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
