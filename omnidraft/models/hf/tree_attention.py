"""Attention masks over key slots for chains and trees, and the check that a model can be served with them.

Shapes: S rows of a pass, C slots.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from omnidraft.errors import ModelError

Masks = torch.Tensor | Mapping[str, torch.Tensor]
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class AttentionMasks:
    """The attention masks of a model's layers with full and with sliding attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelError when a layer has other state than keys and values, which cannot be cut back."""
        config = model.config.get_text_config()
        layers = set(getattr(config, "layer_types", None) or ())
        if model._is_stateful or layers - _KNOWN_LAYERS:
            raise ModelError(
                f"a {config.model_type} model has layers whose state cannot be cut back after a rejected draft; "
                "use a model with full or sliding attention layers only"
            )
        self._is_mixed = bool(layers)
        window = getattr(config, "sliding_window", None)
        has_window = "sliding_attention" in layers or (not layers and getattr(config, "use_sliding_window", True))
        self._window: int | None = window if has_window else None

    def masks(self, sees_SC: torch.Tensor, positions_S: torch.Tensor, start: int) -> Masks:
        """Return the masks for every layer type; slot C holds position C, but from `start` on this pass's rows."""
        full = sees_SC[None, None]
        if self._window is None:
            return full
        positions_C = torch.arange(sees_SC.shape[1], device=sees_SC.device)
        positions_C[start : start + len(positions_S)] = positions_S
        near_SC = positions_S[:, None] - positions_C < self._window
        near = (sees_SC & near_SC)[None, None]
        return {"full_attention": full, "sliding_attention": near} if self._is_mixed else near


def has_length_dependent_rope(config: PreTrainedConfig) -> bool:
    """Return whether the rotation of a key depends on the final length of the text; then passes do not agree on it."""
    return any(kind in _LENGTH_DEPENDENT_ROPE for kind in _rope_types(getattr(config, "rope_parameters", None) or {}))


def _rope_types(parameters: Mapping[str, Any]) -> list[str]:
    """Return the rope type of the model, or of each layer type."""
    each = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    return [str(rope.get("rope_type")) for rope in each]


def chain_visibility(start: int, rows: int, visible: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions [S] and visible slots [S, C] when each row continues the one before."""
    positions_S = torch.arange(start, start + rows)
    return positions_S, torch.arange(visible) <= positions_S[:, None]


def tree_visibility(parents: Sequence[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for a tree whose root is its own parent: a node sees all kept ids, its ancestors and itself."""
    rows = len(parents)
    depths = [0] * rows
    sees_SS = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        depths[row] = depths[parents[row]] + 1
        sees_SS[row] |= sees_SS[parents[row]]
    prefix = torch.ones(rows, start, dtype=torch.bool)
    return start + torch.tensor(depths), torch.cat([prefix, sees_SS], dim=1)
