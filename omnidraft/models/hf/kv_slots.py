"""Keys and values of one request in preallocated slots; the caller sets where a pass writes and how far it reads.

transformers calls `update` once a layer and pass. Rejected drafts cost nothing: the next pass overwrites them.
Shapes: C slots (the capacity), H key heads, D head size, S positions.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class _SlotLayer(CacheLayerMixin):
    """One layer's slots, zero-filled because a masked NaN would still propagate."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.start = 0
        self.visible = capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        _, heads, _, size = key_states.shape
        self.keys = key_states.new_zeros(1, heads, self.capacity, size)
        self.values = value_states.new_zeros(1, heads, self.capacity, value_states.shape[-1])
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

    def grow(self, capacity: int) -> None:
        """Go on in so many slots."""
        keys, values = self.keys, self.values
        self.capacity, self.start, self.keys, self.values = capacity, 0, None, None
        if keys is not None and values is not None:
            self.update(keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.visible, 0

    def get_seq_length(self) -> int:
        return self.start

    def get_max_length(self) -> int:
        return self.capacity


class KvSlots(Cache):
    """All layers' slots. Implements kv_session.KvBackend."""

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        *,
        keeps_hidden: bool = False,
        factors: Any = None,
        rotation_offset: int = 0,
    ) -> None:
        """See kv_session.KvModel."""
        self.capacity = capacity
        self.start, self.visible = 0, capacity
        self.keeps_hidden = keeps_hidden
        self.hidden_RH = torch.empty(0, dtype=torch.float32)
        self.factors = factors
        self.rotation_offset = rotation_offset
        self._slots = [_SlotLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self._slots))

    def set_range(self, start: int, visible: int) -> None:
        """Let the next pass write from slot `start` on and read the first `visible` slots."""
        self.start, self.visible = start, visible
        for layer in self._slots:
            layer.start, layer.visible = start, visible

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the keys and the values of each layer; a layer that reads those of another one has none."""
        for layer in self._slots:
            if layer.keys is not None and layer.values is not None:
                yield from (layer.keys, layer.values)

    @property
    def num_bytes(self) -> int:
        """The memory of all keys and values."""
        return sum(slots_1HCD.nbytes for slots_1HCD in self._tensors())

    @torch.inference_mode()
    def move(self, sources: Sequence[int], start: int) -> None:
        """See kv_session.KvBackend."""
        if list(sources) == list(range(start, start + len(sources))):
            return
        index_S = torch.tensor(sources)
        for slots_1HCD in self._tensors():
            slots_1HCD[:, :, start : start + len(sources)] = slots_1HCD[:, :, index_S]

    @torch.inference_mode()
    def copy(self, source: "KvSlots", num_ids: int) -> None:
        """See kv_session.KvBackend."""
        for layer, other in zip(self._slots, source._slots, strict=True):
            if other.keys is not None and other.values is not None:
                layer.start = 0
                layer.update(other.keys[:, :, :num_ids], other.values[:, :, :num_ids])

    @torch.inference_mode()
    def grow(self, capacity: int) -> None:
        """Go on in so many slots."""
        self.capacity = capacity
        for layer in self._slots:
            layer.grow(capacity)

    def enlarged(self, capacity: int) -> "KvSlots":
        """Return a copy with more slots."""
        larger = KvSlots(len(self._slots), self.capacity, rotation_offset=self.rotation_offset)
        for layer, copy in zip(self._slots, larger._slots, strict=True):
            copy.keys, copy.values = layer.keys, layer.values
        larger.grow(capacity)
        return larger
