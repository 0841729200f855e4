"""Keys and values of one request in preallocated slots: written where we say, read up to where we say.

transformers calls `update` once a layer and pass. Rejected drafts cost nothing: the next pass writes over them.
Shapes: C slots (the capacity), H key heads, D head size, S positions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class _SlotLayer(CacheLayerMixin):
    """One layer's slots; zero-filled, because a masked NaN would still leak."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.start = 0
        self.visible = capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, size = key_states.shape
        self.keys = key_states.new_zeros(batch, heads, self.capacity, size)
        self.values = value_states.new_zeros(batch, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.start + key_states.shape[2]
        self.keys[:, :, self.start : end] = key_states
        self.values[:, :, self.start : end] = value_states
        return self.keys[:, :, : self.visible], self.values[:, :, : self.visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.visible, 0

    def get_seq_length(self) -> int:
        return self.start

    def get_max_length(self) -> int:
        return self.capacity


class KvSlots(Cache):
    """All layers' slots."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.start = 0
        self._slots = [_SlotLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self._slots))

    def place(self, start: int, visible: int) -> None:
        """The next pass writes from slot `start` on and reads the first `visible` slots."""
        self.start = start
        for layer in self._slots:
            layer.start, layer.visible = start, visible

    @torch.inference_mode()
    def gather(self, sources: Sequence[int], start: int) -> None:
        """Move the slots `sources` to `start`, `start + 1`, ... ."""
        if list(sources) == list(range(start, start + len(sources))):
            return
        index_S = torch.tensor(sources)
        for layer in self._slots:
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys[:, :, start : start + len(sources)] = layer.keys[:, :, index_S]
            layer.values[:, :, start : start + len(sources)] = layer.values[:, :, index_S]

    @torch.inference_mode()
    def grown(self, capacity: int) -> "KvSlots":
        """A copy with more slots."""
        larger = KvSlots(len(self._slots), capacity)
        for layer, copy in zip(self._slots, larger._slots, strict=True):
            if layer.keys is not None and layer.values is not None:
                copy.lazy_initialization(layer.keys, layer.values)
                assert copy.keys is not None
                assert copy.values is not None
                copy.keys[:, :, : self.capacity] = layer.keys
                copy.values[:, :, : self.capacity] = layer.values
        return larger
