"""The attention of a transformers model whose keys are in slots: its masks, the check that the model can be served with
them, rotation by the length of a text, and grouped-query attention without copies.

transformers copies all keys and values once for every query head before a masked pass of more than one id on a
processor; torch's kernel reads each key head in place, for all the query heads that share it, with the same bits.
Shapes: S rows of a pass, C slots.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from omnidraft.errors import ContractError, ModelError
from omnidraft.models.hf.padded_session import Attend, TextGroup, TextKeys, attend_in_groups

Masks = torch.Tensor | Mapping[str, torch.Tensor]
_SHARED_HEADS, _ADDED_MASKS = "sdpa_with_shared_heads", "eager_with_added_masks"
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention"}
_BIASED = {"bloom", "mpt"}
"""Models whose positions are ALiBi's, which their configurations do not say."""
_LIMITS = ("max_position_embeddings", "max_seq_len")
_ANY_LENGTH = 1 << 20


class PackedKeys(torch.Tensor):
    """The new keys of a pass over several texts, which carry what each text reads; its new values are guarded alike."""

    texts: Sequence[TextKeys]
    groups: Callable[[], Sequence[TextGroup]]
    """Returns the groups in which an accelerator computes them."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be computed with: another attention would mix the texts."""
        raise ContractError(f"{function} takes the keys of one text, not those of several")


class AttentionMasks:
    """The attention masks of a model's layers with full and with sliding attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelError where it takes none."""
        config = model.config.get_text_config()
        if takes_chains_only(model):
            raise ModelError(
                f"a {config.model_type} model cannot draft: its layers take no masks of trees and texts, but have a "
                "state, chunks or distances of their own; use it as the target"
            )
        layers = _layer_types(config)
        self._is_mixed = bool(layers - {"attention"})
        self._is_added = model.config._attn_implementation == "eager"
        window = getattr(config, "sliding_window", None)
        has_window = "sliding_attention" in layers or (not layers and getattr(config, "use_sliding_window", True))
        self._window: int | None = window if has_window else None

    def masks(self, sees_SC: torch.Tensor, positions_S: torch.Tensor, start: int, num_rows: int) -> Masks:
        """Return the masks of the last rows for every layer type; slot C holds position C, but from `start` on those of
        all S rows."""
        positions_C = torch.arange(sees_SC.shape[1], device=sees_SC.device)
        positions_C[start : start + len(positions_S)] = positions_S
        return self.of(sees_SC[-num_rows:], positions_S[-num_rows:, None] - positions_C)

    def of(self, sees_RK: torch.Tensor, distance_RK: torch.Tensor) -> Masks:
        """Return the masks of rows that see these keys, which are so many positions before them."""
        full = self._form(sees_RK)
        if self._window is None:
            return full
        near = self._form(sees_RK & (distance_RK < self._window))
        return {"full_attention": full, "sliding_attention": near} if self._is_mixed else near

    def _form(self, sees_RK: torch.Tensor) -> torch.Tensor:
        """Return a mask [1, 1, rows, keys] of the keys that each row sees."""
        return added_mask(sees_RK[None, None]) if self._is_added else sees_RK[None, None]


def takes_chains_only(model: PreTrainedModel) -> bool:
    """Return whether a model takes no masks of trees: it has windows, chunks or distances of its own, or layers with
    another state than keys and values."""
    config = model.config.get_text_config()
    layers = _layer_types(config)
    return (
        bool(layers - _KNOWN_LAYERS)
        or (model._is_stateful and not layers)
        or config.model_type in _BIASED
        or getattr(config, "alibi", False)
        or "local" in str(getattr(config, "attention_types", ""))
    )


def _layer_types(config: PreTrainedConfig) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def added_mask(sees: torch.Tensor) -> torch.Tensor:
    """Return what transformers' own attention adds to the scores, where torch's takes a boolean mask."""
    added = torch.zeros(sees.shape, dtype=torch.float32, device=sees.device)
    return added.masked_fill_(~sees, torch.finfo(torch.float32).min)


def context_limit(config: PreTrainedConfig) -> int:
    """Return the maximal number of ids of a text. Recurrent layers and ALiBi set no limit."""
    limit: int = next((value for name in _LIMITS if (value := getattr(config, name, None))), _ANY_LENGTH)
    return limit


def first_context(config: PreTrainedConfig) -> int:
    """Return the context of a `longrope` model's first training, behind which texts have other rotary factors from
    their first id on. That of other models is their limit."""
    longrope = [rope for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    return min([context_limit(config), *(rope["original_max_position_embeddings"] for rope in longrope)])


def _ropes(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """Return the rope parameters of the model, or of each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]


def tell_long_texts_apart(model: PreTrainedModel) -> None:
    """Let a `longrope` model rotate each id of a pass as its text's length wants it; see ports.rotation_offset."""
    first = first_context(model.config.get_text_config())
    for module in rotary_modules(model):
        module.forward = partial(rotate_by_length, partial(type(module).forward, module), first)


def rotary_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules that rotate by the length of a text."""
    return [each for each in model.modules() if "longrope" in str(getattr(each, "rope_type", ""))]


def rotate_by_length(
    rotate: Callable[..., Sequence[torch.Tensor]],
    first_context: int,
    x: torch.Tensor,
    position_ids: torch.Tensor,
    *args: Any,
    **options: Any,
) -> Sequence[torch.Tensor]:
    """Return cos and sin of positions as transformers has them in short texts, and from `first_context` on as it has
    those from 0 on in long texts, which it knows by their last position."""
    is_long = position_ids >= first_context
    if not is_long.any():
        return rotate(x, position_ids, *args, **options)
    last = torch.full_like(position_ids[..., :1], _ANY_LENGTH)
    long_positions = torch.cat([(position_ids - first_context).clamp(min=0), last], dim=-1)
    long = rotate(x, long_positions, *args, **options)
    short = rotate(x, position_ids.clamp(max=first_context - 1), *args, **options)
    return [torch.where(is_long[..., None], *each) for each in zip((each[:, :-1] for each in long), short, strict=True)]


def share_key_heads(model: PreTrainedModel) -> None:
    """Make the model's masked attention on a processor work without copies, and take the texts of a pass apart. The
    attention of a model that transformers' own interface does not reach stays unchanged."""
    attend: dict[str | None, tuple[str, Any, Any]] = {"sdpa": (_SHARED_HEADS, attend_with_shared_heads, sdpa_mask)}
    if model._supports_attention_backend:
        attend["eager"] = (_ADDED_MASKS, attend_with_added_mask, eager_mask)
    if (found := attend.get(model.config._attn_implementation)) is not None:
        name, function, mask = found
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, mask)
        model.set_attn_implementation(name)


def attend_with_added_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as the model's own module does without torch's attention, which has no caps or sinks of scores."""
    eager = sys.modules[type(module).__module__].eager_attention_forward

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        added = mask if mask.is_floating_point() else added_mask(mask)
        mixed: torch.Tensor = eager(module, query, key, value, added.to(query.dtype), **options)[0]
        return mixed

    if isinstance(key, PackedKeys):
        return _attend_texts(attend, query, mask, key), None
    return attend(query, key, value, mask), None


def attend_with_shared_heads(
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
        attend = partial(attend_with_shared_heads, module, dropout=dropout, scaling=scaling, **options)
        return _attend_texts(lambda *inputs: attend(*inputs)[0], query, attention_mask, key), None
    if attention_mask is None or has_special_scores(options) or not query.is_cpu:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return mixed.transpose(1, 2).contiguous(), None


def _attend_texts(attend: Attend, query: torch.Tensor, mask: torch.Tensor, packed: PackedKeys) -> torch.Tensor:
    """Return the mixed values of all texts' rows: on a processor text by text, without copies of keys."""
    if not _is_on_processor(query):
        return attend_in_groups(attend, query, mask, packed.texts, packed.groups())
    return attend_by_text(attend, query, mask, packed.texts)


def attend_by_text(attend: Attend, query: torch.Tensor, mask: torch.Tensor, texts: Sequence[TextKeys]) -> torch.Tensor:
    """Return the mixed values of all texts' rows, computed one text after the other."""
    mixed = [attend(query[:, :, rows], keys, values, mask[:, :, rows, : keys.shape[2]]) for rows, keys, values in texts]
    return torch.cat(mixed, dim=1)


def has_special_scores(options: Mapping[str, Any]) -> bool:
    """Return whether scores are more than scaled products of queries and keys."""
    return any(options.get(name) is not None for name in ("softcap", "position_bias"))


def _is_on_processor(query: torch.Tensor) -> bool:
    return query.is_cpu
