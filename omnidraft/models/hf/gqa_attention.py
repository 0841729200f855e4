"""Grouped-query attention that reads each key head in place, for all the query heads that share it.

transformers copies all keys and values once for every query head before a masked pass of more than one id on a
processor; torch's kernel gives the same bits without the copies.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "sdpa_with_shared_heads"


def share_key_heads(model: PreTrainedModel) -> None:
    """Make the model's masked attention on a processor work without copies; all other attention stays unchanged."""
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    is_special = any(options.get(name) is not None for name in ("softcap", "position_bias"))
    if attention_mask is None or is_special or not query.is_cpu:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return mixed.transpose(1, 2).contiguous(), None
