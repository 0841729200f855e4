"""A target over text_session.py, and its check that the bits of a logit do not depend on the rest of the pass, as
reproducible mode requires."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from omnidraft.errors import ModeRefused
from omnidraft.models.text_session import TextSession, forward
from omnidraft.ports import DraftTree, Mode, TreeLimits


class SessionCalls:
    """The calls of ports.Target that text_session.py answers."""

    def forward(
        self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor]:
        """See ports.Target; the sessions are this target's."""
        return forward(trees, prompts)

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        """See ports.Target; the sessions are this target's."""
        num_reused: int = session.reuse(source, num_ids)
        return num_reused


class TextTarget(SessionCalls, ABC):
    """Implements ports.Target. One pass at a time."""

    max_rows: int
    _tested_chains, _tested_width = 1, 1
    """The chains and the ids of each, the root counted, of the trees of the self-test."""

    def __init__(
        self, vocab_size: int, context_limit: int, fingerprint: str, *, first_context: int | None = None
    ) -> None:
        """`first_context`: see ports.Target; None: texts of all lengths are rotated alike."""
        self.vocab_size = vocab_size
        self.context_limit = context_limit
        self.first_context = first_context or context_limit
        self.fingerprint = fingerprint
        self._refusals: dict[int, ModeRefused | None] = {}

    @abstractmethod
    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""

    @abstractmethod
    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> TextSession:
        """See ports.Target. Raises ModeRefused when reproducible mode does not hold on this machine."""

    @abstractmethod
    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target."""

    def require_self_test(self, num_slots: int) -> None:
        """Run the self-test of so many slots, which takes as long as a few texts, unless it was run. Raises
        ModeRefused."""
        if num_slots not in self._refusals:
            try:
                self.self_test(num_slots)
                self._refusals[num_slots] = None
            except ModeRefused as exc:
                self._refusals[num_slots] = exc
        if (refusal := self._refusals[num_slots]) is not None:
            raise ModeRefused(refusal.reason, refusal.advice)

    def self_test(self, num_slots: int) -> None:
        """Compare full passes, begun at every offset, with one id at a time, bit by bit.

        Raises:
            ModeRefused: some bit differs, so reproducible mode cannot be promised here.
        """
        chains, width = self._tested_chains, self._tested_width
        alone, blocks = (self._tested_session(num_slots) for _ in range(2))
        holds = is_deterministic(alone, blocks, vocab_size=self.vocab_size, chains=chains, width=width)
        alone.close()
        blocks.close()
        if not holds:
            raise ModeRefused(
                f"reproducible mode does not hold for this model, precision and machine (chains {chains}, width "
                f"{width}, slots {num_slots})"
            )

    def _tested_session(self, num_slots: int) -> TextSession:
        """Return a session of so many slots that has kept nothing."""
        raise NotImplementedError


def is_deterministic(alone: TextSession, blocks: TextSession, *, vocab_size: int, chains: int, width: int) -> bool:
    """Return whether full passes give the same bits as one id at a time.

    Each chain of the pass in turn holds the text, and all the others hold arbitrary ids.

    Args:
        alone: a session of some text, for passes over one id.
        blocks: another session of it, for full passes.
    """
    ids = [(7 * i + 3) % vocab_size for i in range(2 * width)]
    alone_SV = torch.stack([_extend(alone, token) for token in ids])
    for start in range(width):
        text, expected_SV = ids[start : start + width], alone_SV[start : start + width]
        for tree, nodes in _blocks(text, chains, vocab_size):
            if not torch.equal(blocks.score(tree)[nodes], expected_SV):
                return False
        blocks.keep((0,))
    return True


def _extend(session: TextSession, token: int) -> torch.Tensor:
    """Score one id by itself, keep it and return its logits [V]."""
    logits_NV = session.score(DraftTree.empty(token))
    session.keep((0,))
    return logits_NV[0]


def _blocks(text: Sequence[int], chains: int, vocab_size: int) -> Iterator[tuple[DraftTree, list[int]]]:
    """Yield, for every chain, a full tree whose root begins the text and whose chain of that number continues it, and
    the nodes of the text."""
    depth = len(text) - 1
    parents = [0] + [0 if node % depth == 0 else node for node in range(chains * depth)]
    for chain in range(chains):
        drafted = [(31 * node + 11 * text[0] + 5) % vocab_size for node in range(chains * depth)]
        first = chain * depth
        drafted[first : first + depth] = text[1:]
        tokens = (text[0], *drafted)
        tree = DraftTree(tokens, tuple(parents), (None,) * len(tokens), (0.0,) * len(tokens))
        yield tree, [0, *range(first + 1, first + depth + 1)]
