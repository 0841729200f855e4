"""The target as a GGUF file run by an unmodified llama.cpp: chains and trees in one pass, rejected drafts removed.

Each leaf of a tree has a llama.cpp sequence; a node belongs to the sequences of all leaves behind it, the kept text to
sequence 0. llama.cpp's matrix kernels compute four rows differently than one, so in reproducible mode every pass has
the same number of rows, a multiple of four; `self_test` verifies that no bit of a logit then depends on the draft.
Shapes: N nodes of the tree, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from omnidraft.config import DecodeSettings
from omnidraft.errors import ConfigError, ContractError, VocabularyError
from omnidraft.models.llamacpp.context import CELL_STEP, BatchEntry, Context, LlamaModel
from omnidraft.models.llamacpp.crash_probe import build
from omnidraft.models.serial_passes import forward_serially, require_new
from omnidraft.models.target_checks import ids_needed
from omnidraft.ports import DraftTree, Mode, TreeLimits
from omnidraft.vocab.tokenizer import Vocabulary

_MAX_NODES = 63
_PREFILL_ROWS = 128
_ROW_STEP = 4
"""Kernels compute rows in groups of this size, and the rest one by one."""
_NUM_CHECKED = 1000
"""Number of ids whose bytes are compared at loading."""


class LlamaCppTarget:
    """Implements ports.Target. One pass at a time; every session has a context of its own."""

    def __init__(self, model: LlamaModel, settings: DecodeSettings, *, name: str, bits: int = 16) -> None:
        """
        Args:
            bits: bits of each number of keys and values.
        """
        self._model = model
        self._rows = -(-settings.width // _ROW_STEP) * _ROW_STEP
        self._threads = settings.threads or torch.get_num_threads()
        self._bits = bits
        self._is_verified = False
        self.vocab_size = model.vocab_size
        self.context_limit = model.context_limit
        self.max_rows = _PREFILL_ROWS
        self.fingerprint = f"{name}-llamacpp-{build()}-kv{bits}-w{self._rows}-t{self._threads}"

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        return TreeLimits(self._rows - 1, num_chains=1) if mode == "reproducible" else TreeLimits(_MAX_NODES)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "_Session":
        """See ports.Target. Raises ConfigError when reproducible mode does not hold on this machine."""
        needed = ids_needed(prompt_ids, max_new_tokens, self.context_limit)
        if mode == "reproducible" and not self._is_verified:
            self.self_test()
            self._is_verified = True
        return self._session(needed, mode, prompt_ids[:-1])

    def forward(
        self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor]:
        """See ports.Target; the sessions are this target's."""
        return forward_serially(trees, prompts)

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        """See ports.Target; the sessions are this target's."""
        require_new(session)
        return 0

    def kv_bytes(self, num_ids: int) -> int:
        """See ports.Target."""
        return self._num_cells(num_ids) * self._model.num_key_numbers * 2 * self._bits // 8

    def _num_cells(self, num_ids: int) -> int:
        return -(-(num_ids + _MAX_NODES + self._rows) // CELL_STEP) * CELL_STEP

    def _session(self, num_ids: int, mode: Mode, prompt_ids: Sequence[int] = ()) -> "_Session":
        context = Context(
            self._model,
            self._num_cells(num_ids),
            max_rows=max(_PREFILL_ROWS, self._rows),
            num_sequences=_MAX_NODES,
            threads=self._threads,
            bits=self._bits,
        )
        return _Session(context, self.limits(mode), prompt_ids, self._rows if mode == "reproducible" else None)

    def self_test(self) -> None:
        """Compare full blocks, begun at every offset, against one row at a time, bit by bit, where the number of cells
        that a pass reads changes.

        Raises:
            ConfigError: some bit differs, so reproducible mode cannot be promised here.
        """
        width = self._rows
        start = CELL_STEP - width - width // 2
        ids = [(7 * i + 3) % self.vocab_size for i in range(start + 2 * width)]
        session = self._session(len(ids), "reproducible", ids[:start])
        alone_NV = [session.extend(token) for token in ids[start:]]
        session.rewind(start)
        for first in range(width):
            rows = ids[start + first : start + first + width]
            block = DraftTree(tuple(rows), (0, *range(width - 1)), (None,) * width, (0.0,) * width)
            if not torch.equal(session.score(block), torch.stack(alone_NV[first : first + width])):
                raise ConfigError(
                    f"reproducible mode does not hold for this model and this build of llama.cpp (width {width}): "
                    "set decode.mode = 'fast'"
                )
            session.keep((0,))
        session.close()


class _Session:
    """Implements ports.TargetSession."""

    def __init__(
        self, context: Context, limits: TreeLimits, prompt_ids: Sequence[int], padded_rows: int | None
    ) -> None:
        self._context = context
        self._limits = limits
        self._padded_rows = padded_rows
        self._prompt_ids = tuple(prompt_ids)
        self._num_prefilled = 0
        """In reproducible mode the end of the last whole chunk, which is computed as soon as its first id is read."""
        self.num_kept = 0
        self._sequences: list[tuple[int, ...]] = []
        """Sequences of each node of the last scored tree, until some are kept."""

    @property
    def num_unread(self) -> int:
        return max(len(self._prompt_ids) - self.num_kept, 0)

    def read(self, num_ids: int) -> None:
        """Compute the keys of so many unread prompt ids; in reproducible mode in chunks of one size from position 0."""
        self.num_kept += num_ids
        while self._num_prefilled < self.num_kept:
            start = self._num_prefilled
            end = start + _PREFILL_ROWS if self._padded_rows else min(self.num_kept, start + _PREFILL_ROWS)
            chunk = self._prompt_ids[start:end]
            entries = [BatchEntry(token, start + row) for row, token in enumerate(chunk)]
            self._context.decode(entries, has_logits=False)
            self._num_prefilled += len(chunk)

    def extend(self, token: int) -> torch.Tensor:
        """Score one id by itself, keep it and return its logits [V]."""
        logits_NV = self.score(DraftTree.empty(token))
        self.keep((0,))
        return logits_NV[0]

    def rewind(self, num_kept: int) -> None:
        """Go back to the first `num_kept` ids."""
        self._context.cut(0, num_kept)
        self.num_kept = num_kept

    def score(self, tree: DraftTree) -> torch.Tensor:
        if not tree.fits(self._limits):
            raise ContractError(f"a tree of {len(tree) - 1} drafted nodes does not fit {self._limits}")
        if self.num_unread:
            self.read(self.num_unread)
        if self._sequences:
            self.keep(())
        self._sequences = sequences(tree)
        for other in self._sequences[0][1:]:
            self._context.share(0, other)
        entries = [
            BatchEntry(token, self.num_kept + depth, members)
            for token, depth, members in zip(tree.tokens, tree.depths, self._sequences, strict=True)
        ]
        padding = (self._padded_rows or len(entries)) - len(entries)
        entries += [BatchEntry(0, self.num_kept + len(entries) + row) for row in range(padding)]  # continues the chain
        logits_NV = self._context.decode(entries, has_logits=True)
        assert logits_NV is not None
        return logits_NV[: len(tree)]

    def keep(self, nodes: Sequence[int]) -> None:
        start = self.num_kept
        self.num_kept += len(nodes)
        chosen = self._sequences[nodes[-1]][0] if nodes else 0
        self._context.cut(chosen, self.num_kept)
        if chosen:
            self._context.cut(0, start)
            self._context.share(chosen, 0, start)
        if len(self._sequences[0]) > 1:
            self._context.keep_only(0)
        self._sequences = []

    def close(self) -> None:
        self._context.close()


def sequences(tree: DraftTree) -> list[tuple[int, ...]]:
    """Return the sequences of each node; leaf number i ends sequence i."""
    members: list[list[int]] = [[] for _ in range(len(tree))]
    for sequence, leaf in enumerate(tree.leaves or (0,)):
        node = leaf
        while node:
            members[node].append(sequence)
            node = tree.parents[node]
        members[0].append(sequence)
    return [tuple(each) for each in members]


def load_target(gguf: Path, vocabulary: Vocabulary, settings: DecodeSettings, *, name: str) -> LlamaCppTarget:
    """Load a GGUF file as the target.

    Raises:
        ConfigError: llama-cpp-python is not installed.
        ModelError: llama.cpp cannot load the file.
        VocabularyError: its ids are not those of the tokenizer.
    """
    model = LlamaModel(gguf)
    require_same_ids(model, vocabulary, gguf.name)
    return LlamaCppTarget(model, settings, name=name)


def require_same_ids(model: LlamaModel, vocabulary: Vocabulary, name: str) -> None:
    """Raise VocabularyError when the file's ids differ from the tokenizer's, by their number or their bytes."""
    if model.vocab_size != len(vocabulary):
        raise VocabularyError(
            f"{name} has {model.vocab_size} ids and the tokenizer {len(vocabulary)}: they are not of one model"
        )
    for token in range(0, len(vocabulary), max(len(vocabulary) // _NUM_CHECKED, 1)):
        expected = vocabulary.token_bytes[token]
        if expected and model.piece(token) != expected:
            raise VocabularyError(
                f"id {token} is {model.piece(token)!r} in {name} and {expected!r} in the tokenizer: "
                "they are not of one model"
            )
