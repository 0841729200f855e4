"""A Llama-family model computed by kernels.cpp, and the KV backend of one text.

Shapes: R rows of a pass, C slots, L layers, K key heads, D head size, V vocabulary, H hidden size.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from transformers import PreTrainedModel

from omnidraft.errors import ContractError
from omnidraft.models.kv_session import ForwardRequest
from omnidraft.models.native import library as native
from omnidraft.models.native.weights import PackedLlama

_CAPACITY_STEP = 512
MAX_ROWS = 64
"""Maximum number of rows of a pass, enough to make reading the weights cheap beside computing with them."""
_MAX_ROWS_OF_TEXT = 16
"""Maximum number of rows of one text in a pass over several."""


class NativeLlama:
    """A model at one set of weights, for many texts."""

    def __init__(self, model: PreTrainedModel, precision: str, library: native.Library) -> None:
        """
        Args:
            model: one that weights.is_supported.
            precision: `int8` and `int4` round weights per group and activations to 16 bits; the others keep activations
                exact.
            library: a build of our kernels that works here; see library.load.
        """
        self._library = library
        self._weights = PackedLlama(model, precision, self._library)
        self.build = Path(self._library._name).stem[:18]
        """Identifies source, compiler and processor, on which bits depend besides the weights."""
        self.vocab_size: int = model.config.vocab_size
        self.hidden_size: int = model.config.hidden_size
        self.context_limit: int = model.config.max_position_embeddings

    def slots(self, capacity: int) -> torch.Tensor:
        """Return empty keys and values [L, 2, K, C * D]; the keys of eight slots are interleaved."""
        sizes = self._weights.struct
        shape = (sizes.num_layers, 2, sizes.num_key_heads, capacity * sizes.head_size)
        return torch.zeros(shape, dtype=self._weights.kv_dtype)

    def kv_bytes(self, num_ids: int) -> int:
        """Return the memory of the keys and values of a text of so many ids."""
        sizes = self._weights.struct
        size_of_slot = sizes.num_layers * 2 * sizes.num_key_heads * sizes.head_size * self._weights.kv_dtype.itemsize
        return capacity_for(num_ids) * size_of_slot

    def scratch(self, capacity: int, threads: int) -> torch.Tensor:
        """Return the scratch memory of a pass of any number of rows."""
        size = self._library.omnidraft_scratch_bytes(self._weights.struct, MAX_ROWS, capacity, threads)
        return torch.empty(size, dtype=torch.uint8)

    def compute(self, segments: Sequence["PassSegment"], logits_RV: torch.Tensor, hidden_RH: torch.Tensor) -> None:
        """Compute one pass over the rows of several texts, without the interpreter's lock. The results of a text do not
        depend on the other texts.

        Args:
            logits_RV: the output: `num_logits` last rows of each segment, in order.
            hidden_RH: the output for the normed last hidden states of the same rows; may be empty.
        """
        numbered = list(enumerate(segments))
        unscored = [(number, node) for number, each in numbered for node in each.nodes[: each.num_without_logits]]
        scored = [(number, node) for number, each in numbered for node in each.nodes[each.num_without_logits :]]
        rows = [*unscored, *scored]
        texts, nodes = zip(*rows, strict=True)
        largest = max((segment.backend for segment in segments), key=lambda backend: backend.capacity)
        self._library.omnidraft_forward(
            self._weights.struct,
            native.PassStruct(
                rows=len(nodes),
                logit_rows=len(scored),
                capacity=largest.capacity,
                threads=largest.threads,
                ids=_ints([segments[text].ids[node - segments[text].nodes[0]] for text, node in rows]),
                texts=_ints(texts),
                nodes=_ints(nodes),
                text=(native.TextStruct * len(segments))(*(segment.struct for segment in segments)),
                scratch=largest.scratch.data_ptr(),
                logits=logits_RV.data_ptr(),
                hidden=hidden_RH.data_ptr() if len(hidden_RH) else None,
            ),
        )

    def move(self, kv: torch.Tensor, capacity: int, sources: Sequence[int], start: int) -> None:
        """See kv_session.KvBackend."""
        self._library.omnidraft_move(self._weights.struct, kv.data_ptr(), capacity, _ints(sources), len(sources), start)


@dataclass(frozen=True, slots=True)
class PassSegment:
    """The rows of one text in a pass: the last `ids` of a tree of `parents` behind its first `length` ids."""

    backend: "NativeKvBackend"
    length: int
    parents: Sequence[int]
    ids: Sequence[int]
    num_logits: int
    """Number of last ids whose logits are computed."""

    @property
    def nodes(self) -> range:
        return range(len(self.parents) - len(self.ids), len(self.parents))

    @property
    def num_without_logits(self) -> int:
        return len(self.ids) - self.num_logits

    @property
    def struct(self) -> native.TextStruct:
        return native.TextStruct(
            length=self.length,
            capacity=self.backend.capacity,
            parents=_ints(self.parents),
            kv=self.backend.kv.data_ptr(),
        )


def compute_batch(model: NativeLlama, batch: Sequence[tuple["NativeKvBackend", ForwardRequest]]) -> list[torch.Tensor]:
    """Compute one request of each of these different texts in as few passes as possible."""
    segments = [backend.final_segment(request) for backend, request in batch]
    logits: list[torch.Tensor] = []
    while segments:
        num_rows = list(accumulate(len(segment.ids) for segment in segments))
        group = segments[: max(bisect_right(num_rows, MAX_ROWS), 1)]
        logits += _compute_pass(model, group)
        segments = segments[len(group) :]
    return logits


def _compute_pass(model: NativeLlama, segments: Sequence[PassSegment]) -> Sequence[torch.Tensor]:
    sizes = [segment.num_logits for segment in segments]
    keeps_hidden = any(segment.backend.keeps_hidden for segment in segments)
    logits_RV = torch.empty(sum(sizes), model.vocab_size, dtype=torch.float32)
    hidden_RH = torch.empty(sum(sizes) if keeps_hidden else 0, model.hidden_size, dtype=torch.float32)
    model.compute(segments, logits_RV, hidden_RH)
    for segment, hidden in zip(segments, hidden_RH.split(sizes), strict=True) if keeps_hidden else ():
        segment.backend.hidden_RH = hidden
    return logits_RV.split(sizes)


class NativeKvBackend:
    """Implements kv_session.KvBackend."""

    def __init__(self, model: NativeLlama, capacity: int = 0, *, keeps_hidden: bool = False) -> None:
        """
        Args:
            capacity: initial number of slots; more are allocated when needed.
            keeps_hidden: False leaves `hidden_RH` empty.
        """
        self._model = model
        self.keeps_hidden = keeps_hidden
        self.hidden_RH = self._hidden_of(0)
        self.capacity = self.threads = 0
        self.kv = model.slots(0)
        if capacity:
            self._grow(capacity, torch.get_num_threads())

    def compute(self, request: ForwardRequest) -> torch.Tensor:
        if request.parents is None:
            return self._chain(request.length, request.ids, 1)
        return self.tree(request.length, request.parents, request.ids)

    def final_segment(self, request: ForwardRequest) -> PassSegment:
        """Return the rows for a shared pass; all but the end of a long chain is computed now."""
        if request.parents is not None:
            return self.segment(request.length, request.parents, request.ids, len(request.ids))
        num_before = max(len(request.ids) - _MAX_ROWS_OF_TEXT, 0)
        if num_before:
            self.fill(request.length, request.ids[:num_before])
        ids = request.ids[num_before:]
        return self.segment(request.length + num_before, range(-1, len(ids) - 1), ids, 1)

    def fill(self, start: int, ids: Sequence[int]) -> None:
        """Compute the keys of these ids, which follow the first `start` ids of the text."""
        self._chain(start, ids, 0)

    def tree(self, length: int, parents: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        before = len(parents) - len(ids)
        logits_RV, self.hidden_RH = self._logits_of(len(ids)), self._hidden_of(len(ids))
        for first in range(0, len(ids), MAX_ROWS):
            chunk = slice(first, min(first + MAX_ROWS, len(ids)))
            self._pass(length, parents[: before + chunk.stop], ids[chunk], logits_RV[chunk], self.hidden_RH[chunk])
        return logits_RV

    def move(self, sources: Sequence[int], start: int) -> None:
        if list(sources) != list(range(start, start + len(sources))):
            self._model.move(self.kv, self.capacity, sources, start)

    def _chain(self, start: int, ids: Sequence[int], num_logits: int) -> torch.Tensor:
        """Compute a chain and return the logits of its last row, or of none."""
        logits_RV, self.hidden_RH = self._logits_of(num_logits), self._hidden_of(num_logits)
        for first in range(0, len(ids), MAX_ROWS):
            chunk = ids[first : first + MAX_ROWS]
            outputs = slice(num_logits if first + len(chunk) == len(ids) else 0)
            self._pass(start + first, range(-1, len(chunk) - 1), chunk, logits_RV[outputs], self.hidden_RH[outputs])
        return logits_RV

    def _logits_of(self, num_rows: int) -> torch.Tensor:
        return torch.empty(num_rows, self._model.vocab_size, dtype=torch.float32)

    def _hidden_of(self, num_rows: int) -> torch.Tensor:
        return torch.empty(num_rows if self.keeps_hidden else 0, self._model.hidden_size, dtype=torch.float32)

    def _pass(
        self,
        length: int,
        parents: Sequence[int],
        ids: Sequence[int],
        logits_RV: torch.Tensor,
        hidden_RH: torch.Tensor,
    ) -> None:
        self._model.compute([self.segment(length, parents, ids, len(logits_RV))], logits_RV, hidden_RH)

    def segment(self, length: int, parents: Sequence[int], ids: Sequence[int], num_logits: int) -> PassSegment:
        """Return a segment of a pass, with slots allocated for its keys. Raises ContractError."""
        needed, threads = length + len(parents), torch.get_num_threads()
        if not (needed <= self._model.context_limit and min(ids) >= 0 and max(ids) < self._model.vocab_size):
            raise ContractError(f"{needed} ids or an id of {list(ids)}: more than this model's tables hold")
        if needed > self.capacity or threads > self.threads:
            self._grow(needed, threads)
        return PassSegment(self, length, parents, ids, num_logits)

    def _grow(self, needed: int, threads: int) -> None:
        capacity = max(self.capacity, capacity_for(needed))
        larger = self._model.slots(capacity)
        larger[..., : self.kv.shape[-1]] = self.kv
        self.kv, self.capacity, self.threads = larger, capacity, threads
        self.scratch = self._model.scratch(capacity, threads)


def capacity_for(num_ids: int) -> int:
    """Return the number of slots of a text of so many ids."""
    return -(-num_ids // _CAPACITY_STEP) * _CAPACITY_STEP


def _ints(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int]":
    return (ctypes.c_int * len(values))(*values)
