"""The weights of a described model as parts, each packed where the caller wants it.

Shapes: N output channels, K input channels.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from transformers import PreTrainedModel

from omnidraft.models.hf.attention import takes_chains_only
from omnidraft.models.native import library as native
from omnidraft.models.native.description import Described
from omnidraft.models.native.layer_description import DescribedLayer, Undescribed
from omnidraft.models.native.matrix import address_of, memory, pack
from omnidraft.models.native.packed_model import LayerSizes, PackedModel, Part, Source, layer_part

_BIASES = {"qkv": "bias", "out": "out_bias", "gate_up": "gate_up_bias", "down": "down_bias"}


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Return why the native pass does not compute what the model does; None if it does."""
    if torch.cuda.is_available():
        return "there is an accelerator"
    if takes_chains_only(model):
        return "its layers have a state, chunks or distances of their own"
    try:
        Described(model)
    except Undescribed as exc:
        return str(exc)
    return None


def packed_in_memory(model: PreTrainedModel, precision: str, library: ctypes.CDLL) -> PackedModel:
    """Pack a model that is supported into one block of memory."""
    weights = ModelParts(model, precision, library)
    *starts, size = accumulate((part.padded_bytes for part in weights.parts), initial=0)
    block = memory(size)
    addresses = {part.name: address_of(block) + start for part, start in zip(weights.parts, starts, strict=True)}
    for part in weights.parts:
        part.write(addresses[part.name])
    return PackedModel(weights.sizes, precision, addresses, block)


class ModelParts:
    """The parts of a model that is supported; nothing is packed before a part is written."""

    def __init__(self, model: PreTrainedModel, precision: str, library: ctypes.CDLL) -> None:
        self._library = library
        kind = native.PACKED.get(precision, precision)
        self._kind, self._head_kind = native.KINDS[kind], native.KINDS[native.HEADS.get(kind, kind)]
        self._embedding_dtype = torch.float32 if precision == "float32" else torch.bfloat16
        self._model = Described(model)
        self.sizes = self._model.sizes
        layers = enumerate(self._model.layers)
        self.parts: Sequence[Part] = [
            *(part for number, layer in layers for part in self._layer(number, layer)),
            *self._whole_model(),
        ]

    def _layer(self, number: int, layer: DescribedLayer) -> Iterator[Part]:
        name = partial(layer_part, number)
        for norm, weights in layer.norms():
            yield _tensor(name(norm), weights)
        if layer.sinks is not None:
            yield _tensor(name("sinks"), layer.sinks.detach().float())
        if layer.experts is not None:
            for part, tensor in layer.routing():
                yield _tensor(name(part), tensor)
            for matrix, experts in layer.expert_matrices():
                if matrix.endswith("bias"):
                    yield _tensor(name(matrix), torch.cat([_in_turns(each) for each in experts]))
                else:
                    yield self._experts(name(matrix), experts)
        for matrix, sources in layer.sizes.sources.items():
            if not sources:
                continue
            if (bias := self._bias(matrix, layer, sources)) is not None:
                yield _tensor(name(_BIASES[matrix]), bias)
            yield self._matrix(name(matrix), layer, sources, in_turns=matrix == native.TURNS)

    def _whole_model(self) -> Iterator[Part]:
        model = self._model
        for name, weights in model.norms.items():
            yield _tensor(name, weights)
        yield self._whole("head", model.head.weight, self._head_kind)
        yield _tensor("embedding", model.embedding.weight.detach().to(self._embedding_dtype))
        if self.sizes.layer_inputs:
            yield _tensor("input_embedding", model.input_embedding.weight.detach().to(self._embedding_dtype))
            yield self._whole("input_projection", model.input_projection.weight, self._kind)
        for rotation in sorted({each.rotation for each in self.sizes.layers if each.rotation is not None}):
            for name, table in zip(("cos", "sin"), model.rotation(rotation), strict=True):
                yield _tensor(f"{name}.{rotation}", table)
        if (scale := model.query_scale()) is not None:
            yield _tensor("query_scale", scale)

    def _whole(self, name: str, weight_NK: torch.Tensor, kind: int) -> Part:
        size = self._packed_bytes(kind, weight_NK.shape)
        return Part(name, size, lambda address: pack(self._library, kind, weight_NK, address, 1, 0))

    def _matrix(self, name: str, layer: DescribedLayer, sources: Sequence[Source], *, in_turns: bool) -> Part:
        """Return a part with the rows of these sources one after the other, or with their blocks in turns."""
        inputs = layer.module.get_submodule(sources[0].module).weight.shape[1]
        sizes = [self._packed_bytes(self._kind, (source.num_rows, inputs)) for source in sources]

        def write(address: int) -> None:
            for number, (source, start) in enumerate(zip(sources, accumulate(sizes, initial=0), strict=False)):
                weight_NK = _rows(layer.module.get_submodule(source.module).weight, source, layer.sizes)
                if in_turns:
                    pack(self._library, self._kind, weight_NK, address, len(sources), number)
                else:
                    pack(self._library, self._kind, weight_NK, address + start, 1, 0)

        return Part(name, sum(sizes), write)

    def _experts(self, name: str, experts: Sequence[Sequence[torch.Tensor]]) -> Part:
        """Return a part with the matrices of each expert, their blocks in turns, one expert after the other."""
        size = sum(self._packed_bytes(self._kind, each.shape) for each in experts[0])

        def write(address: int) -> None:
            for number, matrices in enumerate(experts):
                for turn, weight_NK in enumerate(matrices):
                    pack(self._library, self._kind, weight_NK, address + number * size, len(matrices), turn)

        return Part(name, size * len(experts), write)

    def _bias(self, matrix: str, layer: DescribedLayer, sources: Sequence[Source]) -> torch.Tensor | None:
        """Return the biases of a matrix in the order of its blocks; None if it has none."""
        biases = [layer.module.get_submodule(source.module).bias for source in sources]
        if all(bias is None for bias in biases):
            return None
        rows = [_rows(bias.detach(), source, layer.sizes) for bias, source in zip(biases, sources, strict=True)]
        return _in_turns(rows) if matrix == native.TURNS else torch.cat([_in_turns([row]) for row in rows])

    def _packed_bytes(self, kind: int, shape: Sequence[int]) -> int:
        size: int = self._library.omnidraft_packed_bytes(kind, *shape)
        return size


def _rows(tensor: torch.Tensor, source: Source, sizes: LayerSizes) -> torch.Tensor:
    rows = sizes.rows(source)
    return tensor if torch.equal(rows, torch.arange(len(tensor))) else tensor[rows]


def _in_turns(biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return these biases with their blocks in turns."""
    padded = [torch.nn.functional.pad(each.float(), (0, -len(each) % native.BLOCK)) for each in biases]
    return torch.stack([each.view(-1, native.BLOCK) for each in padded], dim=1).flatten()


def _tensor(name: str, tensor: torch.Tensor) -> Part:
    """Return a part that is a tensor as it is."""
    kept = tensor.contiguous()

    def write(address: int) -> None:
        ctypes.memmove(address, kept.data_ptr(), kept.nbytes)

    return Part(name, kept.nbytes, write)
