"""Grouped-query attention that reads each key head in place, for all the query heads that share it.

transformers copies all keys and values once for every query head before a masked pass of more than one id on a
processor; torch's kernel gives the same bits without the copies.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from omnidraft.errors import ContractError

_NAME = "sdpa_with_shared_heads"


class PackedKeys(torch.Tensor):
    """The new keys of a pass over several texts, which carry what each text reads."""

    texts: Sequence[tuple[slice, torch.Tensor, torch.Tensor]]
    """The rows of each text, and its keys and values in all slots up to its last row."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be computed with: another attention would mix the texts."""
        raise ContractError(f"{function} takes the keys of one text, not those of several")


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
    if isinstance(key, PackedKeys):
        assert attention_mask is not None
        mixed_texts = [
            _attend(
                module,
                query[:, :, rows],
                keys,
                values,
                attention_mask[:, :, rows, : keys.shape[2]],
                dropout,
                scaling,
                **options,
            )[0]
            for rows, keys, values in key.texts
        ]
        return torch.cat(mixed_texts, dim=1), None
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
