"""The attention of a training pass over several texts: each text attends to its own rows, one after the other.

One mask over all rows of all texts would cost as much as a single text of their joint length.
Shapes: R rows of one text in a pass, K keys that they read, G key heads, M rows times query heads of a key head, D head
size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from omnidraft.models.hf.attention import (
    PackedKeys,
    attend_by_text,
    attend_with_shared_heads,
    has_special_scores,
)
from omnidraft.ports import PackedTexts

_NAME = "sdpa_of_packed_texts"
MOST_SCORES = 1 << 20
"""Rows times keys of a text whose attention keeps its scores for the gradient: 2 MiB a head and layer. Longer texts
take torch's kernel, which computes them again in float32."""


def take_texts_apart(model: PreTrainedModel) -> bool:
    """Let the model attend to the keys of a PackedTextCache; False when its own attention, which cannot, must stay."""
    if model.config._attn_implementation not in ("sdpa", _NAME):
        return False
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    return True


class _TextsLayer(CacheLayerMixin):
    """The keys and values of one layer, by text."""

    is_sliding = False

    def __init__(self, rows_of_text: Sequence[tuple[int, slice]]) -> None:
        super().__init__()
        self._rows_of_text = rows_of_text
        self._of_text: dict[int, tuple[Tensor, Tensor]] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: a text begins with its first keys."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        packed: PackedKeys = key_states.as_subclass(PackedKeys)
        packed.texts = []
        for text, rows in self._rows_of_text:
            new = (key_states[:, :, rows], value_states[:, :, rows])
            old = self._of_text.get(text)
            keys, values = new if old is None else (torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))
            self._of_text[text] = (keys, values)
            packed.texts.append((rows, keys, values))
        return packed, value_states.as_subclass(PackedKeys)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class PackedTextCache(Cache):
    """Keys and values of all texts of a pass."""

    def __init__(self, num_layers: int) -> None:
        self._rows_of_text: list[tuple[int, slice]] = []
        """The texts that have rows in the pass under way, and these rows. All layers have this list: a layer with its
        cache would be a cycle, which keeps the pass in memory."""
        super().__init__(layers=[_TextsLayer(self._rows_of_text) for _ in range(num_layers)])

    def begin(self, texts: PackedTexts, rows: slice) -> None:
        """Expect a pass over these rows; those of a text stand together."""
        numbers, lengths = torch.unique_consecutive(texts.text_R[rows], return_counts=True)
        ends = lengths.cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        self._rows_of_text[:] = [
            (number, slice(start, end)) for number, start, end in zip(numbers.tolist(), starts, ends, strict=True)
        ]


class _SixteenBitAttention(torch.autograd.Function):
    """Attention by four batched products in bfloat16: torch's own kernel computes its gradient in float32.

    The query heads that share a key head are rows of one product.
    """

    @staticmethod
    def forward(
        ctx: Any, query_GMD: Tensor, key_GKD: Tensor, value_GKD: Tensor, bias_RK: Tensor, scale: float
    ) -> Tensor:
        share = _shares(query_GMD, key_GKD, bias_RK, scale)
        ctx.save_for_backward(query_GMD, key_GKD, value_GKD, share)
        ctx.scale = scale
        return torch.bmm(share, value_GKD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_GMD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query_GMD, key_GKD, value_GKD, share = ctx.saved_tensors
        grad_share = torch.bmm(grad_GMD, value_GKD.transpose(1, 2))
        grad_score = torch._softmax_backward_data(grad_share, share, -1, share.dtype).mul_(ctx.scale)
        return (
            torch.bmm(grad_score, key_GKD),
            torch.bmm(grad_score.transpose(1, 2), query_GMD),
            torch.bmm(share.transpose(1, 2), grad_GMD),
            None,
            None,
        )


def _shares(query_GMD: Tensor, key_GKD: Tensor, bias_RK: Tensor, scale: float) -> Tensor:
    score = torch.bmm(query_GMD, key_GKD.transpose(1, 2))
    by_head = score.view(len(score), -1, *bias_RK.shape)
    return torch.add(bias_RK, by_head, alpha=scale).softmax(dim=-1).view_as(score)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    if not isinstance(key, PackedKeys):
        return attend_with_shared_heads(module, query, key, value, attention_mask, **options)
    assert attention_mask is not None
    return attend_by_text(partial(_attend_to_one, module, **options), query, attention_mask, key.texts), None


def _attend_to_one(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
) -> Tensor:
    is_long = mask.shape[2] * mask.shape[3] > MOST_SCORES
    if query.dtype != torch.bfloat16 or not query.requires_grad or has_special_scores(options) or is_long:
        return attend_with_shared_heads(module, query, key, value, mask, **options)[0]
    _, num_heads, num_rows, size = query.shape
    bias_RK = torch.zeros(mask.shape[2:], dtype=query.dtype).masked_fill_(~mask[0, 0], float("-inf"))
    query_GMD = query.reshape(key.shape[1], -1, size)
    mixed = _SixteenBitAttention.apply(query_GMD, key[0], value[0], bias_RK, options["scaling"])
    return mixed.view(1, num_heads, num_rows, -1).transpose(1, 2)
