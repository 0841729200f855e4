"""The number format that the matrices of a transformers model are computed in.

`packed16`, `int8` and `int4` run in our own kernels (native/kernels/), where a row depends neither on the other rows
of the pass nor on the number of threads: bfloat16 weights in float32 arithmetic, and weights rounded to 256 levels a
group of 128 inputs or to 16 levels a group of 32. On processors that multiply no matrices of bfloat16, `packed16` reads
half of what float32 reads, and several rows cost little more than one.
Shapes of a layer: R rows, K inputs, N outputs.
"""

import logging
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import repeat
from typing import Any

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

_LARGE_SHARE = 0.05
"""The share of weights in float32 from which a packed model is noticeably larger than its precision says."""

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
    return min(choice.near_fastest(seconds), key=ORDER.index)


def warn_of_rounding(model: nn.Module, precision: str, name: str) -> None:
    """Say it when the matrices of a model have more bits than `precision` keeps, which are those of bfloat16."""
    if library.PACKED.get(precision, precision) != "bfloat16":
        return
    for matrix in (parameter for parameter in model.parameters() if parameter.dim() > 1):
        if matrix.dtype != torch.bfloat16 and not torch.equal(matrix, matrix.bfloat16().to(matrix.dtype)):
            kind = str(matrix.dtype).removeprefix("torch.")
            text = (
                "%s has weights of %s, which %s rounds to bfloat16: models.precision = 'float32' keeps all their bits"
            )
            return logger.warning(text, name, kind, precision)


class PackedLinear(nn.Module):
    """Replaces a product with a matrix by one with packed weights, which computes in float32."""

    def __init__(
        self,
        weight_NK: torch.Tensor,
        bias_N: torch.Tensor | None,
        kind: str,
        kernels: library.Library,
        threads: ThreadCount,
    ) -> None:
        """
        Args:
            threads: the model's, for all its matrices.
        """
        super().__init__()
        self._library = kernels
        self._threads = threads
        self._kind = library.KINDS[kind]
        self.out_features, self.in_features = weight_NK.shape
        self._bias = None if bias_N is None else bias_N.detach().float()
        self._memory = memory(kernels.omnidraft_packed_bytes(self._kind, *weight_NK.shape))
        self._address = address_of(self._memory)
        pack(kernels, self._kind, weight_NK, self._address)

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


class PackedExperts(nn.Module):
    """Replaces a module of experts that transformers stacks; no row's bits depend on which experts the others meet.

    Shapes: R rows, T experts of a row.
    """

    def __init__(self, experts: Any, kind: str, kernels: library.Library, threads: ThreadCount) -> None:
        super().__init__()
        self._experts = experts
        self._into, self._out = (
            nn.ModuleList(
                PackedLinear(weight.T if experts.is_transposed else weight, bias, kind, kernels, threads)
                for weight, bias in zip(*_taken(experts, name), strict=False)
            )
            for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
        )

    def forward(self, x_RK: torch.Tensor, experts_RT: torch.Tensor, shares_RT: torch.Tensor) -> torch.Tensor:
        chosen = [each for each in experts_RT.unique().tolist() if each < len(self._out)]  # the rest is no expert
        places = {each: (experts_RT == each).nonzero(as_tuple=True) for each in chosen}
        inside = _multiplied(self._into, x_RK[:, None].expand(-1, experts_RT.shape[1], -1), places)
        act = self._experts._apply_gate if self._experts.has_gate else self._experts.act_fn
        outputs_RTN = _multiplied(self._out, act(inside.flatten(0, 1)).unflatten(0, experts_RT.shape), places)
        if self._experts.has_post_expert_norm:
            outputs_RTN = self._experts.post_expert_norm(outputs_RTN)
        return (outputs_RTN * shares_RT[..., None]).sum(dim=1)


def _multiplied(matrices: Any, x_RTK: torch.Tensor, places: Mapping[int, tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """Return the products of experts' matrices with their rows, and zeros where a row meets none."""
    products_RTN = torch.zeros(*x_RTK.shape[:-1], matrices[0].out_features, dtype=torch.float32)
    for expert, place in places.items():
        products_RTN[place] = matrices[expert](x_RTK[place])
    return products_RTN


def _taken(experts: Any, name: str) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor | None]]:
    """Return the matrices of all experts and their biases, and take them out of their module."""
    weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    delattr(experts, name)
    if bias is not None:
        delattr(experts, f"{name}_bias")
    return weight, repeat(None) if bias is None else bias


class FloatEmbedding(nn.Module):
    """An embedding that keeps its table in bfloat16 and returns float32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(embedding.weight.detach().to(torch.bfloat16), requires_grad=False)
        self._scale = getattr(embedding, "embed_scale", None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(ids, self.weight).float()
        return rows if self._scale is None else rows * self._scale.float()


def _matrix(module: Any) -> torch.Tensor | None:
    """Return the weights of a module that PackedLinear replaces; None for others, as routers of experts."""
    if type(module).__name__ == "Conv1D":
        weight_NK: torch.Tensor = module.weight.T
        return weight_NK
    is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return module.weight if is_plain or type(module).__name__ == "FalconLinear" else None


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
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name != "dt_proj" and (weight_NK := _matrix(child)) is not None:  # Mamba reads its weights
                bias: Any = child.bias
                layer_kind = library.HEADS.get(kind, kind) if child is head else kind
                setattr(parent, name, PackedLinear(weight_NK, bias, layer_kind, kernel_library, threads))
            elif hasattr(child, "is_transposed") and hasattr(child, "down_proj"):  # transformers' interface of experts
                setattr(parent, name, PackedExperts(child, kind, kernel_library, threads))
            elif isinstance(child, nn.Embedding) and _is_plain_or_scaled(child):
                setattr(parent, name, FloatEmbedding(child))
    for module in model.modules():
        if not isinstance(module, FloatEmbedding):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
    kept = sum(each.numel() for each in model.parameters() if each.dim() > 1 and each.dtype == torch.float32)
    if kept > _LARGE_SHARE * num_weights:
        text = "%s: %.0f %% of the weights are in modules that our kernels do not pack, and stay in float32"
        logger.warning(text, type(model).__name__, 100 * kept / num_weights)
    return model
