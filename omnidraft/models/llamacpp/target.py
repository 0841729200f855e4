"""The target as a GGUF file run by an unmodified llama.cpp: chains and trees in one pass, rejected drafts removed.

Fast mode: a pass holds the trees of all texts. Reproducible mode: texts are computed one after another, in passes of
one shape; `self_test` verifies that no bit of a logit then depends on the draft.
Shapes: N nodes of a tree, V vocabulary.

Reproducible mode has a context for each text. llama.cpp's matrix kernels compute four rows differently than one, so
every pass has the same number of rows, a multiple of four, and prompts are read in chunks of one size from position 0.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from omnidraft.errors import ConfigError, VocabularyError
from omnidraft.models.llamacpp.context import CELL_STEP, MAX_SEQUENCES, BatchEntry, Context, LlamaModel
from omnidraft.models.llamacpp.crash_probe import build
from omnidraft.models.llamacpp.shared_context import SharedContext, SharedSession
from omnidraft.models.text_session import ChunkedSession, TextSession
from omnidraft.models.text_target import TextTarget
from omnidraft.ports import DraftTree, Mode, TreeLimits, ids_needed
from omnidraft.vocab.tokenizer import Vocabulary

PREFILL_ROWS = 128
"""Prompt ids that are read together."""


class PaddedLlamaCppSession(ChunkedSession):
    """Implements ports.TargetSession. Trees are chains."""

    _chunk = PREFILL_ROWS

    def __init__(
        self, open_context: Callable[[int], Context], prompt_ids: Sequence[int], limits: TreeLimits, num_rows: int
    ) -> None:
        """
        Args:
            open_context: returns a context for a text of so many ids and the rows of a pass; more come with the text.
            num_rows: the rows of every pass over a tree.
        """
        super().__init__(prompt_ids, limits)
        self._open_context = open_context
        self._context = open_context(len(prompt_ids) + 1)
        self._num_rows = num_rows

    def _read(self, ids: Sequence[int]) -> None:
        self._context.decode([BatchEntry(token, self._num_read + row, (0,), False) for row, token in enumerate(ids)])

    def _take(self, source: Any, num_ids: int) -> int:
        is_small_enough = source._context.length(0) <= self._context.num_cells  # it is copied whole, then cut
        if not (is_small_enough and source._context.is_whole(0)):
            return 0
        self._context.load(0, source._context.save(0))
        self._context.cut(0, num_ids)
        return num_ids

    def _score(self, tree: DraftTree) -> torch.Tensor:
        self._context.cut(0, self.num_kept)
        if self.num_kept + self._num_rows > self._context.num_cells:
            self._enlarge()
        padded = (*tree.tokens, *[0] * (self._num_rows - len(tree)))
        entries = [BatchEntry(token, self.num_kept + row) for row, token in enumerate(padded)]
        return self._context.decode(entries)[: len(tree)]

    def _enlarge(self) -> None:
        """Go on in a larger context."""
        larger = self._open_context(self.num_kept + 1)
        larger.load(0, self._context.save(0))
        self._context.close()
        self._context = larger

    def keep(self, nodes: Sequence[int]) -> None:
        self.num_kept += len(nodes)
        self._context.cut(0, self.num_kept)

    def close(self) -> None:
        self._context.close()


_MAX_NODES = 63
_ROWS = 8
"""Rows of a pass in reproducible mode: kernels compute them in groups of 4, and the rest one by one."""
_LOGIT_BYTES = 4
_NUM_CHECKED = 1000
"""Number of ids whose bytes are compared at loading."""


class LlamaCppTarget(TextTarget):
    """Implements ports.Target. One pass at a time."""

    max_rows = PREFILL_ROWS

    def __init__(
        self,
        model: LlamaModel,
        *,
        name: str,
        threads: int | None = None,
        rows: int = _ROWS,
        bits: int = 16,
        max_texts: int = 16,
    ) -> None:
        """
        Args:
            threads: None takes torch's number.
            rows: those of a pass in reproducible mode.
            bits: bits of each number of keys and values.
            max_texts: the number of texts of one pass.

        Raises:
            ConfigError: llama.cpp cannot hold so many texts.
        """
        if max_texts > MAX_SEQUENCES:
            raise ConfigError(f"scheduler.max_num_seqs is {max_texts}; llama.cpp decodes at most {MAX_SEQUENCES} texts")
        self._model = model
        self._rows = rows
        self._threads = threads or torch.get_num_threads()
        self._bits = bits
        self._context_rows = max(PREFILL_ROWS, rows)
        self._tested_width = rows
        self._shared = SharedContext(self._context, max_texts)
        fingerprint = f"{name}-llamacpp-{build()}-kv{bits}-w{rows}-t{self._threads}"
        super().__init__(model.vocab_size, model.context_limit, fingerprint)

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        if mode == "reproducible":
            return TreeLimits(self._rows - 1, num_chains=1)
        return TreeLimits(_MAX_NODES, num_chains=self._shared.num_leaves)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> TextSession:
        """See ports.Target."""
        ids_needed(prompt_ids, max_new_tokens, self.context_limit)
        if mode == "fast":
            return SharedSession(self._shared, prompt_ids[:-1], self.limits(mode))
        self.require_self_test(CELL_STEP)
        return self._padded_session(prompt_ids[:-1])

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target. A text in reproducible mode has a context of its own, whose logits count too."""
        is_alone = mode == "reproducible"
        num_cells = max(self._num_cells(num_ids), self._model.min_cells if is_alone else 0)
        logits_bytes = self._context_rows * self.vocab_size * _LOGIT_BYTES if is_alone else 0
        return num_cells * self._model.num_key_numbers * 2 * self._bits // 8 + logits_bytes

    def _num_cells(self, num_ids: int) -> int:
        return -(-(num_ids + _MAX_NODES + self._rows) // CELL_STEP) * CELL_STEP

    def _context(self, num_cells: int, num_sequences: int) -> Context:
        return Context(
            self._model,
            num_cells,
            max_rows=self._context_rows,
            num_sequences=num_sequences,
            threads=self._threads,
            bits=self._bits,
        )

    def _padded_session(self, prompt_ids: Sequence[int]) -> PaddedLlamaCppSession:
        def open_context(num_ids: int) -> Context:
            return self._context(self._num_cells(num_ids), 1)

        return PaddedLlamaCppSession(open_context, prompt_ids, self.limits("reproducible"), self._rows)

    def _tested_session(self, num_slots: int) -> PaddedLlamaCppSession:
        """Begin where the number of cells that a pass reads changes."""
        start = num_slots - self._rows - self._rows // 2
        return self._padded_session([(7 * number + 3) % self.vocab_size for number in range(start)])


def load_target(
    gguf: Path, vocabulary: Vocabulary, *, name: str, threads: int | None = None, max_texts: int = 16
) -> LlamaCppTarget:
    """Load a GGUF file as the target; see LlamaCppTarget for `threads` and `max_texts`.

    Raises:
        ConfigError: llama-cpp-python is not installed, or llama.cpp cannot hold so many texts.
        ModelError: llama.cpp cannot load the file.
        VocabularyError: its ids are not those of the tokenizer.
    """
    model = LlamaModel(gguf)
    require_same_ids(model, vocabulary, gguf.name)
    return LlamaCppTarget(model, name=name, threads=threads, max_texts=max_texts)


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
