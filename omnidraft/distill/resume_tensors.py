"""The named tensors in the resume part of a snapshot: weights and their AdamW state, trace records, and plain data."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from omnidraft.errors import ConfigError
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord

_MASTER, _MEAN, _SQUARE, _STEPS = "master.", "exp_avg.", "exp_avg_sq.", "num_updates"
_SCHEMA_HEADERS = ("schema", "schema_version")
RECORD_NAME = r"(?:held_out|replay)\.\d{6}"
"""The names of all tensors that are records, as a regular expression."""

Parameters = Mapping[str, torch.nn.Parameter]


def adam_state(parameters: Parameters, optimizer: torch.optim.Optimizer, prefix: str = "") -> dict[str, Tensor]:
    """Return the weights and their AdamW state, names beginning with `prefix`. The tensors are in use, not copies."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[prefix + _MASTER + name] = parameter.detach()
        if adam := optimizer.state.get(parameter):
            tensors[prefix + _MEAN + name] = adam["exp_avg"]
            tensors[prefix + _SQUARE + name] = adam["exp_avg_sq"]
            tensors[prefix + _STEPS] = adam["step"]
    return tensors


def load_adam_state(
    parameters: Parameters, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], prefix: str = ""
) -> None:
    """Continue from where `adam_state` was taken.

    Raises:
        ConfigError: it belongs to other weights; then nothing changed.
    """
    copy_into(parameters, master_weights(parameters, tensors, prefix))
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if prefix + _MEAN + name in tensors:
            optimizer.state[parameter] = {
                "step": tensors[prefix + _STEPS].clone(),
                "exp_avg": tensors[prefix + _MEAN + name].clone(),
                "exp_avg_sq": tensors[prefix + _SQUARE + name].clone(),
            }


def master_weights(parameters: Parameters, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return the weights in what `adam_state` returned. Raises ConfigError when they do not fit the parameters."""
    masters = {
        name.removeprefix(prefix + _MASTER): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix + _MASTER)
    }
    if masters.keys() != parameters.keys():
        raise ConfigError("the snapshot's master weights are of another learner.train or head (decode.policy)")
    check_shapes(parameters, masters)
    return masters


@torch.no_grad()
def copy_into(parameters: Parameters, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters of the same names.

    Raises:
        ConfigError: one is missing or of another shape; then nothing changed.
    """
    check_shapes(parameters, tensors)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def check_shapes(parameters: Parameters, tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError when the tensor of a parameter's name is missing or of another shape."""
    for name, parameter in parameters.items():
        if name not in tensors or tensors[name].shape != parameter.shape:
            raise ConfigError(f"the snapshot has no weights {name} of shape {tuple(parameter.shape)}")


def records_to_tensors(prefix: str, records: Iterable[TraceRecord]) -> dict[str, Tensor]:
    """Return the records as tensors, encoded as they are in the log; names of records begin with `prefix`."""
    tensors: dict[str, Tensor] = {}
    for index, record in enumerate(records):
        headers = codec.headers(record)
        tensors |= {name: tensor_of_bytes(headers[name]) for name in _SCHEMA_HEADERS}  # the same for all
        tensors[f"{prefix}{index:06d}"] = tensor_of_bytes(codec.encode(record, max_bytes=None))
    return tensors


def records_from_tensors(prefix: str, tensors: Mapping[str, Tensor]) -> list[TraceRecord]:
    """Return the records in the order that `records_to_tensors` got. Raises WireError when one cannot be read."""
    names = sorted(name for name in tensors if name.startswith(prefix))
    return [record_of(tensors[name], tensors) for name in names]


def record_of(tensor: Tensor, tensors: Mapping[str, Tensor]) -> TraceRecord:
    """Return the record in a tensor, which is one of these. Raises WireError when it cannot be read."""
    headers = {name: tensor_to_bytes(tensors[name]) for name in _SCHEMA_HEADERS if name in tensors}
    return codec.decode(tensor_to_bytes(tensor), headers, max_bytes=None)


def plain_tensor(value: object) -> Tensor:
    """Return plain data as JSON in a tensor."""
    return tensor_of_bytes(json.dumps(value, sort_keys=True).encode())


def from_plain_tensor(tensor: Tensor) -> Any:
    """Return what `plain_tensor` got."""
    return json.loads(tensor_to_bytes(tensor))


def tensor_of_bytes(data: bytes) -> Tensor:
    """Return bytes as a tensor."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def tensor_to_bytes(tensor: Tensor) -> bytes:
    """Return what `tensor_of_bytes` got."""
    return tensor.numpy().tobytes()
