"""The number format that the matrices of a transformers model are computed in.

`packed16`, `int8` and `int4` run in our own kernels (native/kernels/), where a row depends neither on the other rows
of the pass nor on the number of threads: bfloat16 weights in float32 arithmetic, and weights rounded to 256 levels a
group of 128 inputs or to 16 levels a group of 32. On processors that multiply no matrices of bfloat16, `packed16` reads
half of what float32 reads, and several rows cost little more than one.
Shapes of a layer: R rows, K inputs, N outputs.
"""

import logging
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import nn

from omnidraft.errors import KernelsUnavailable
from omnidraft.models.native import library
from omnidraft.models.native.build import VARIANTS
from omnidraft.models.native.matrix import address_of, memory, pack
from omnidraft.models.native.thread_count import ThreadCount
from omnidraft.models.probe import choice

ORDER = ("bfloat16", "packed16", "float32")
"""Preference among equally fast formats: more rows of bfloat16 cost least, so better drafters gain more with it."""

logger = logging.getLogger(__name__)


def automatic(kernels: str = "auto") -> str:
    """Return the format that `auto` chooses here: bfloat16 on an accelerator, else the faster of packed16 and bfloat16.

    Both keep 16 bits of every weight. Where our kernels do not work, float32 replaces packed16: the same arithmetic
    over twice the memory.

    Args:
        kernels: the build of our kernels to use; see choice.kernels.

    Raises:
        ModelError: `kernels` names a build that does not work here, or nothing works.
    """
    if torch.cuda.is_available():
        return "bfloat16"
    try:
        return _fastest(choice.kernels(kernels).seconds_per_token)
    except KernelsUnavailable as exc:
        if kernels in VARIANTS or kernels == choice.PORTABLE:
            raise
        logger.warning("computing without our kernels, which is slower: %s", exc)
    products = choice.torch_products()
    products.require("float32")
    return _fastest(products.outcome.seconds)


def _fastest(seconds: Mapping[str, float]) -> str:
    """Return the first of ORDER that is not significantly slower than the fastest."""
    limit = (1 + choice.TIMING_NOISE) * min(seconds.values())
    return next(name for name in ORDER if name in seconds and seconds[name] <= limit)


class PackedLinear(nn.Module):
    """Replaces an nn.Linear by one with packed weights, which computes in float32."""

    def __init__(self, linear: nn.Linear, kind: str, kernels: library.Library, threads: ThreadCount) -> None:
        """
        Args:
            threads: the model's, for all its matrices.
        """
        super().__init__()
        self._library = kernels
        self._threads = threads
        self._kind = library.KINDS[kind]
        self.out_features, self.in_features = linear.weight.shape
        self._bias = None if linear.bias is None else linear.bias.detach().float()
        self._memory = memory(kernels.omnidraft_packed_bytes(self._kind, *linear.weight.shape))
        self._address = address_of(self._memory)
        pack(kernels, self._kind, linear.weight, self._address)

    @cached_property
    def weight(self) -> torch.Tensor:
        """The weights that it computes with, unpacked: routers of some models multiply by them themselves."""
        products_KN: torch.Tensor = self(torch.eye(self.in_features))
        return (products_KN if self._bias is None else products_KN - self._bias).T.contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_RK = x.reshape(-1, self.in_features).float()
        rows = len(x_RK)
        if self.in_features % library.GROUP:
            x_RK = nn.functional.pad(x_RK, (0, -self.in_features % library.GROUP))
        x_RK = x_RK.contiguous()
        scratch_bytes = self._library.omnidraft_linear_scratch_bytes(rows, self.in_features)
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
        y_RN = torch.empty(rows, -(-self.out_features // library.BLOCK) * library.BLOCK, dtype=torch.float32)
        if rows:
            sizes = (rows, self.out_features, self.in_features)
            buffers = (scratch.data_ptr(), y_RN.data_ptr())
            threads = (self._threads.choose(torch.get_num_threads()), self._threads.spent_s)
            self._library.omnidraft_linear(self._kind, self._address, x_RK.data_ptr(), *sizes, *buffers, *threads)
        y_RN = y_RN[:, : self.out_features]
        return (y_RN if self._bias is None else y_RN + self._bias).reshape(*x.shape[:-1], self.out_features)


class FloatEmbedding(nn.Module):
    """An embedding that keeps its table in bfloat16 and returns float32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(embedding.weight.detach().to(torch.bfloat16), requires_grad=False)
        self._scale = getattr(embedding, "embed_scale", None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(ids, self.weight).float()
        return rows if self._scale is None else rows * self._scale.float()


def _is_plain(linear: nn.Linear) -> bool:
    """Return whether it is what PackedLinear computes; other kinds, as routers of experts, stay as they are."""
    return type(linear).forward is nn.Linear.forward or type(linear).__name__ == "FalconLinear"


def _is_plain_or_scaled(embedding: nn.Embedding) -> bool:
    """Return whether it is what FloatEmbedding computes; other kinds, as of OPT's positions, stay as they are."""
    return type(embedding) is nn.Embedding or isinstance(getattr(embedding, "embed_scale", None), torch.Tensor)


def apply(model: nn.Module, precision: str, kernels: str = "auto") -> nn.Module:
    """Change the model in place to compute in `precision`, on an accelerator if there is one and the format allows it.

    The head, which decides between tokens, keeps 8 bits in int4.

    Args:
        kernels: the build of our kernels to use; see choice.kernels.

    Raises:
        ModelError: this precision cannot be computed here.
    """
    if precision not in library.PACKED:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            choice.torch_products().require(precision)
        for parameter in model.parameters():  # not the frequencies of rotary embeddings, which 16 bits would bend
            parameter.data = parameter.data.to(torch.float32 if precision == "float32" else torch.bfloat16)
        return model.to(device)
    kernel_library, threads = library.load(kernels), ThreadCount()
    kind = library.PACKED[precision]
    head = model.get_output_embeddings()  # type: ignore[operator]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and _is_plain(child) and name != "dt_proj":  # Mamba reads its weights
                layer_kind = library.HEADS.get(kind, kind) if child is head else kind
                setattr(parent, name, PackedLinear(child, layer_kind, kernel_library, threads))
            elif isinstance(child, nn.Embedding) and _is_plain_or_scaled(child):
                setattr(parent, name, FloatEmbedding(child))
    for module in model.modules():
        if not isinstance(module, FloatEmbedding):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
    return model
