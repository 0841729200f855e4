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

from omnidraft.errors import ConfigError, ContractError, ModeRefused, VocabularyError
from omnidraft.models.llamacpp.context import CELL_STEP, MAX_SEQUENCES, BatchEntry, Context, LlamaModel
from omnidraft.models.llamacpp.crash_probe import build
from omnidraft.models.llamacpp.shared_context import SharedContext, SharedSession
from omnidraft.models.serial_passes import forward_serially, require_new, require_valid_pass
from omnidraft.models.target_checks import SelfTests
from omnidraft.ports import DraftTree, Mode, TargetSession, TreeLimits, ids_needed
from omnidraft.vocab.tokenizer import Vocabulary

PREFILL_ROWS = 128
"""Prompt ids that are read together."""


class PaddedLlamaCppSession:
    """Implements ports.TargetSession. Trees are chains."""

    def __init__(
        self, open_context: Callable[[int], Context], limits: TreeLimits, prompt_ids: Sequence[int], num_rows: int
    ) -> None:
        """
        Args:
            open_context: returns a context for a text of so many ids and the rows of a pass; more come with the text.
            num_rows: the rows of every pass over a tree.
        """
        self._open_context = open_context
        self._context = open_context(len(prompt_ids) + 1)
        self._limits = limits
        self._num_rows = num_rows
        self._prompt_ids = tuple(prompt_ids)
        self._num_prefilled = 0
        """The end of the last whole chunk, which is computed as soon as its first id is read."""
        self.num_kept = 0

    @property
    def num_unread(self) -> int:
        return max(len(self._prompt_ids) - self.num_kept, 0)

    def read(self, num_ids: int) -> None:
        """Count so many unread prompt ids as kept; compute the chunks that hold them."""
        end = self.num_kept + num_ids
        while self._num_prefilled < end:
            start = self._num_prefilled
            chunk = self._prompt_ids[start : start + PREFILL_ROWS]
            self._context.decode([BatchEntry(token, start + row, (0,), False) for row, token in enumerate(chunk)])
            self._num_prefilled += len(chunk)
        self.num_kept = end  # an error leaves them unread

    def copy_keys(self, source: "PaddedLlamaCppSession", num_ids: int) -> int:
        """Begin with the whole chunks that the source has read of these first ids; return the number of ids."""
        num_same = min(num_ids, source._num_prefilled, self.num_unread) // PREFILL_ROWS * PREFILL_ROWS
        is_small_enough = source._context.length(0) <= self._context.num_cells  # it is copied whole, then cut
        if num_same and is_small_enough and source._context.is_whole(0):
            self._context.load(0, source._context.save(0))
            self.rewind(num_same)
            self._num_prefilled = num_same
        return self.num_kept

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
        self.rewind(self.num_kept + len(nodes))

    def close(self) -> None:
        self._context.close()


_MAX_NODES = 63
_ROWS = 8
"""Rows of a pass in reproducible mode: kernels compute them in groups of 4, and the rest one by one."""
_LOGIT_BYTES = 4
_NUM_CHECKED = 1000
"""Number of ids whose bytes are compared at loading."""


class LlamaCppTarget:
    """Implements ports.Target. One pass at a time."""

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
        self._context_rows = max(PREFILL_ROWS, self._rows)
        self._self_tests = SelfTests()
        self._shared = SharedContext(self._context, max_texts)
        self.vocab_size = model.vocab_size
        self.context_limit = self.first_context = model.context_limit
        self.max_rows = PREFILL_ROWS
        self.fingerprint = f"{name}-llamacpp-{build()}-kv{bits}-w{self._rows}-t{self._threads}"

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        if mode == "reproducible":
            return TreeLimits(self._rows - 1, num_chains=1)
        return TreeLimits(_MAX_NODES, num_chains=self._shared.num_leaves)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> TargetSession:
        """See ports.Target. Raises ModeRefused when reproducible mode does not hold on this machine."""
        ids_needed(prompt_ids, max_new_tokens, self.context_limit)
        if mode == "fast":
            return SharedSession(self._shared, self.limits(mode), prompt_ids[:-1])
        self._self_tests.require(self._rows, self.self_test)
        return self._padded_session(prompt_ids[:-1])

    def forward(
        self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor]:
        """See ports.Target; the sessions are this target's. Texts in reproducible mode are computed one by one."""
        require_valid_pass(trees, prompts)
        logits: dict[int, torch.Tensor] = {}
        for kind, compute in ((SharedSession, self._shared.forward), (PaddedLlamaCppSession, forward_serially)):
            scored: list[Any] = [each for each in trees if isinstance(each[0], kind)]
            read: list[Any] = [each for each in prompts if isinstance(each[0], kind)]
            logits |= zip([id(session) for session, _ in scored], compute(scored, read), strict=True)
        return [logits[id(session)] for session, _ in trees]

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        """See ports.Target; the sessions are this target's."""
        require_new(session)
        return session.copy_keys(source, num_ids) if type(session) is type(source) else 0

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

        return PaddedLlamaCppSession(open_context, self.limits("reproducible"), prompt_ids, self._rows)

    def self_test(self) -> None:
        """Compare full blocks, begun at every offset, against one row at a time, bit by bit, where the number of cells
        that a pass reads changes.

        Raises:
            ModeRefused: some bit differs, so reproducible mode cannot be promised here.
        """
        width = self._rows
        start = CELL_STEP - width - width // 2
        ids = [(7 * i + 3) % self.vocab_size for i in range(start + 2 * width)]
        session = self._padded_session(ids[:start])
        alone_NV = [session.extend(token) for token in ids[start:]]
        session.rewind(start)
        for first in range(width):
            rows = ids[start + first : start + first + width]
            block = DraftTree(tuple(rows), (0, *range(width - 1)), (None,) * width, (0.0,) * width)
            if not torch.equal(session.score(block), torch.stack(alone_NV[first : first + width])):
                raise ModeRefused(
                    f"reproducible mode does not hold for this model and this build of llama.cpp (width {width})"
                )
            session.keep((0,))
        session.close()


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
