"""Models that are probability tables, for tests: exact, fast, and strict about the contracts of ports.

The next token depends on the last `order` ids alone, so that a test can compute the right answer. Sessions hold ids
where real ones hold keys, and raise ContractError for every misuse that a real one would answer with wrong logits.
Shapes: S states of a table, V vocabulary, N nodes of a tree.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from omnidraft.errors import ContractError, VocabularyError
from omnidraft.models.text_session import TextSession
from omnidraft.models.text_target import TextTarget
from omnidraft.ports import AcceptanceFn, DraftSession, DraftTree, Mode, TreeLimits, ids_needed
from omnidraft.vocab.tokenizer import Vocabulary

_FACTOR = 1_000_003


class ToyTable:
    """A table of logits: the last `order` ids of a text choose one of S rows."""

    def __init__(self, logits_SV: torch.Tensor, order: int = 2) -> None:
        self.logits_SV = logits_SV.float()
        self.order = order
        self.vocab_size = logits_SV.shape[1]

    @classmethod
    def random(
        cls, vocab_size: int, seed: int, *, order: int = 2, num_states: int = 64, spread: float = 2.0
    ) -> "ToyTable":
        """Make a table of normally distributed logits; a higher `spread` makes the next token more certain."""
        generator = torch.Generator().manual_seed(seed)
        return cls(spread * torch.randn(num_states, vocab_size, generator=generator), order)

    def state(self, ids: Sequence[int]) -> int:
        """Return the row for the token after these ids."""
        mixed = 0
        for token in ids[max(len(ids) - self.order, 0) :]:
            mixed = mixed * _FACTOR + token + 1
        return mixed % len(self.logits_SV)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the raw logits float32 [V] after these ids."""
        return self.logits_SV[self.state(ids)]


class ToyTarget(TextTarget):
    """Implements ports.Target."""

    max_rows = 64

    def __init__(self, table: ToyTable, *, context_limit: int = 4096, limits: TreeLimits | None = None) -> None:
        super().__init__(table.vocab_size, context_limit, f"toy-{table.vocab_size}-{table.order}")
        self.table = table
        self._limits = limits or TreeLimits(64)

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        return self._limits

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "ToyTargetSession":
        """See ports.Target."""
        needed = ids_needed(prompt_ids, max_new_tokens, self.context_limit)
        return ToyTargetSession(self, prompt_ids[:-1], needed)

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target."""
        return num_ids


class ToyTargetSession(TextSession):
    """Implements ports.TargetSession over the ids that were kept."""

    def __init__(self, target: ToyTarget, prompt_ids: Sequence[int], capacity: int) -> None:
        """`prompt_ids` are those to be read before the first root."""
        super().__init__(prompt_ids, target.limits("fast"))
        self._target = target
        self.kept: list[int] = []
        self._capacity = capacity
        self._scored: DraftTree | None = None
        self._is_closed = False

    def _read(self, ids: Sequence[int]) -> None:
        """Raises ContractError when the session is closed."""
        self._require_open()
        self.kept += ids

    def _require_open(self) -> None:
        if self._is_closed:
            raise ContractError("the session is closed")

    def _take(self, source: "ToyTargetSession", num_ids: int) -> int:
        """Raises ContractError when the texts do not begin with the same ids."""
        self._require_open()
        source._require_open()
        self.kept = source.kept[:num_ids]
        if self.kept != list(self._prompt_ids[:num_ids]):
            raise ContractError(f"reuse: the texts do not begin with the same {num_ids} ids")
        return num_ids

    def _score(self, tree: DraftTree) -> torch.Tensor:
        """Raises ContractError for a malformed tree, or one that is too large."""
        self._require_open()
        self._check(tree)
        self._scored = tree
        table = self._target.table
        texts: list[list[int]] = []
        for node, token in enumerate(tree.tokens):
            before = self.kept[-table.order :] if node == 0 else texts[tree.parents[node]]
            texts.append([*before, token])
        return table.logits_SV[[table.state(text) for text in texts]]

    def keep(self, nodes: Sequence[int]) -> None:
        """See ports.TargetSession. Raises ContractError when these nodes form no path, or nothing was scored."""
        tree, self._scored = self._scored, None
        if tree is None:
            raise ContractError("keep: nothing was scored since the last keep")
        if not nodes or nodes[0] != 0:
            raise ContractError(f"keep: a path begins at the root, got {list(nodes)}")
        if any(tree.parents[child] != parent for parent, child in pairwise(nodes)):
            raise ContractError(f"keep: {list(nodes)} is no path of {tree.parents}")
        self.kept += [tree.tokens[node] for node in nodes]
        self.num_kept += len(nodes)

    def close(self) -> None:
        """See ports.TargetSession."""
        self._is_closed = True

    def _check(self, tree: DraftTree) -> None:
        if self._scored is not None:
            raise ContractError("score: the last tree was not kept")
        if len(self.kept) + len(tree) > self._capacity:
            raise ContractError(f"score: {len(self.kept)} kept and {len(tree)} nodes, room for {self._capacity}")
        if any(not 0 <= parent < node for node, parent in enumerate(tree.parents) if node):
            raise ContractError(f"score: a parent stands before its children, got {tree.parents}")
        siblings = list(zip(tree.parents, tree.tokens, strict=True))[1:]
        if len(set(siblings)) < len(siblings):
            raise ContractError("score: two siblings are the same token")


class ToyDrafter:
    """Implements ports.DraftModel."""

    def __init__(self, table: ToyTable, *, context_limit: int = 4096, acceptance: AcceptanceFn | None = None) -> None:
        """`acceptance` holds for every row; None makes a drafter without a head."""
        self.table = table
        self.vocab_size = table.vocab_size
        self.context_limit = context_limit
        self.acceptance = acceptance
        self.has_head = acceptance is not None

    def open(self) -> "ToyDraftSession":
        """See ports.DraftModel."""
        return ToyDraftSession(self)

    def prefill_or_extend_all(self, requests: Sequence[tuple[DraftSession, int, Sequence[int]]]) -> list[np.ndarray]:
        """See ports.DraftModel."""
        return [session.prefill_or_extend(keep, ids) for session, keep, ids in requests]

    def branch_all(self, requests: Sequence[tuple[DraftSession, Sequence[int], Sequence[int]]]) -> list[np.ndarray]:
        """See ports.DraftModel."""
        return [session.branch(ids, parents) for session, ids, parents in requests]


class ToyDraftSession:
    """Implements ports.DraftSession over the ids it has read."""

    def __init__(self, drafter: ToyDrafter) -> None:
        self._drafter = drafter
        self.held: list[int] = []
        self._branched: list[list[int]] = []
        self._num_rows = 0

    def prefill_or_extend(self, keep: int, ids: Sequence[int]) -> np.ndarray:
        """See ports.DraftSession. Raises ContractError for ids outside the vocabulary or beyond the context."""
        if not ids or not 0 <= keep <= len(self.held):
            raise ContractError(f"prefill_or_extend: keep {keep} of {len(self.held)} and add {len(ids)} ids")
        if keep + len(ids) > self._drafter.context_limit:
            raise ContractError(
                f"prefill_or_extend: {keep + len(ids)} ids, the context holds {self._drafter.context_limit}"
            )
        if not all(0 <= token < self._drafter.vocab_size for token in ids):
            raise ContractError(f"prefill_or_extend: ids {list(ids)} of a vocabulary of {self._drafter.vocab_size}")
        self.held, self._branched, self._num_rows = [*self.held[:keep], *ids], [], 1
        return self._drafter.table.logits(self.held).numpy()

    def branch(self, ids: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        """See ports.DraftSession. Raises ContractError for missing parents and for too many ids."""
        num_before = len(self._branched)
        if (needed := len(self.held) + num_before + len(ids)) > self._drafter.context_limit:
            raise ContractError(f"branch: {needed} ids, the context holds {self._drafter.context_limit}")
        are_known = all(-1 <= parent < num_before + number for number, parent in enumerate(parents))
        if not ids or len(ids) != len(parents) or not are_known:
            raise ContractError(f"branch: {len(ids)} ids behind {list(parents)} of {num_before} branched ids")
        for token, parent in zip(ids, parents, strict=True):
            self._branched.append([*(self.held if parent < 0 else self._branched[parent]), token])
        self._num_rows = len(ids)
        return np.stack([self._drafter.table.logits(text) for text in self._branched[num_before:]])

    def acceptance_probabilities(self) -> list[AcceptanceFn] | None:
        """See ports.DraftSession."""
        return None if self._drafter.acceptance is None else [self._drafter.acceptance] * self._num_rows


class ToyTokenizer:
    """Implements vocab.tokenizer.Tokenizer by taking the longest token that fits."""

    def __init__(self, pieces: Sequence[bytes], roles: Mapping[str, int] | None = None) -> None:
        """An empty piece is a special token where `roles` names it, else an id that no text contains."""
        roles = roles or {}
        self.vocabulary = Vocabulary(tuple(pieces), dict(roles), frozenset(roles.values()))

    def encode(self, text: str) -> list[int]:
        """See vocab.tokenizer.Tokenizer. Returns no ids for a text that no tokens spell."""
        try:
            return self.vocabulary.byte_table.longest_match(text.encode())
        except VocabularyError:
            return []

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See vocab.tokenizer.Tokenizer."""
        return [self.encode(text) for text in texts]
