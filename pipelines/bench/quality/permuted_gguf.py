"""The same model with its channels in another order: a GGUF file in bfloat16.

The catalog's weights were quantised once, so they lie on the grid of their file's format, and that format would find
them again without loss. In another order each group of 32 weights comes from many groups of the file. The order of the
hidden channels, of each MLP's channels and of the values inside each head changes no logit but by rounding.
Shapes: a matrix is [N outputs, K inputs].
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, ReaderTensor

from omnidraft.errors import ModelError
from omnidraft.models.llamacpp.gguf_export import ARCHITECTURES, copy_field

_READS_HIDDEN = ("token_embd", "output", "attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
_WRITES_HIDDEN = ("attn_output", "ffn_down")

Orders = tuple[np.ndarray | None, np.ndarray | None]
"""The new order of a tensor's rows and columns; None: they stay."""


def write_permuted(source: Path, made: Path) -> None:
    """Write a file in bfloat16 with its channels in another order.

    Raises:
        ModelError: it is none of ARCHITECTURES.
    """
    reader = GGUFReader(source)
    orders = _ModelOrders(reader)
    writer = GGUFWriter(made, orders.architecture)
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            copy_field(field, writer)
    for tensor in reader.tensors:
        data = _permuted(tensor, orders.of(tensor.name))
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _ModelOrders:
    """New orders of a model's channels."""

    def __init__(self, reader: GGUFReader) -> None:
        def number(name: str) -> int:
            value: int = reader.fields[f"{self.architecture}.{name}"].contents()
            return value

        self.architecture = str(reader.fields["general.architecture"].contents())
        if self.architecture not in ARCHITECTURES:
            raise ModelError(f"the channels of {self.architecture} cannot be put in another order; give --no-permute")
        draws = np.random.default_rng(0)
        hidden, num_heads = number("embedding_length"), number("attention.head_count")
        self._hidden = draws.permutation(hidden)
        self._mlps = [draws.permutation(number("feed_forward_length")) for _ in range(number("block_count"))]
        values = draws.permutation(hidden // num_heads)
        self._values = _of_heads(values, number("attention.head_count_kv"))
        self._attended = _of_heads(values, num_heads)

    def of(self, name: str) -> Orders:
        """Return the orders of a tensor's rows and columns; a vector has columns only."""
        *_, layer, part, kind = ["", "", *name.split(".")]
        if part.endswith("norm"):
            return None, self._hidden
        if kind == "bias":
            return None, self._values if part == "attn_v" else None
        rows: np.ndarray | None = self._hidden if part in _WRITES_HIDDEN else None
        columns: np.ndarray | None = self._hidden if part in _READS_HIDDEN else None
        match part:
            case "attn_v":
                rows = self._values
            case "attn_output":
                columns = self._attended
            case "ffn_gate" | "ffn_up":
                rows = self._mlps[int(layer)]
            case "ffn_down":
                columns = self._mlps[int(layer)]
        return rows, columns


def _of_heads(order: np.ndarray, num_heads: int) -> np.ndarray:
    return np.concatenate([head * len(order) + order for head in range(num_heads)])


def _permuted(tensor: ReaderTensor, orders: Orders) -> np.ndarray:
    rows, columns = orders
    data: np.ndarray = tensor.data
    if tensor.tensor_type == GGMLQuantizationType.BF16:
        data = data.view(np.uint16)
    if rows is not None:
        data = data[rows]
    if columns is not None:
        data = data[..., columns]
    data = np.ascontiguousarray(data)
    return data.view(np.uint8) if tensor.tensor_type == GGMLQuantizationType.BF16 else data
