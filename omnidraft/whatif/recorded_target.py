"""A target whose answers are known: at each position it draws the token that the log has.

Shapes: N nodes of a tree, V vocabulary.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from math import inf

import torch

from omnidraft.models.text_session import TextSession
from omnidraft.models.text_target import TextTarget
from omnidraft.ports import DraftTree, Mode, TreeLimits

_LIMITS = TreeLimits(63)
"""Those of our kernels' targets."""
_ANY_LENGTH = 1 << 30


class RecordedTarget(TextTarget):
    """Implements ports.Target: what a text draws never depends on its drafts, so no weights are needed to draw it
    again."""

    max_rows = 512

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, _ANY_LENGTH, "recorded")
        self._answers = defaultdict[tuple[int, ...], deque[tuple[int, ...]]](deque)

    def expect(self, prompt_ids: tuple[int, ...], answer_ids: tuple[int, ...]) -> None:
        """Let the next text of this prompt draw these ids."""
        self._answers[prompt_ids].append(answer_ids)

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        return _LIMITS

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "_RecordedSession":
        """See ports.Target. Each answer is opened once."""
        return _RecordedSession(self.vocab_size, prompt_ids, self._answers[tuple(prompt_ids)].popleft())

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target."""
        return 0


class _RecordedSession(TextSession):
    """Implements ports.TargetSession; there are no keys."""

    def __init__(self, vocab_size: int, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids[:-1], _LIMITS)
        self._vocab_size, self._answer_ids = vocab_size, answer_ids

    def _read(self, ids: Sequence[int]) -> None:
        """See TextSession."""

    def _score(self, tree: DraftTree) -> torch.Tensor:
        """Return logits that leave the recorded token alone behind each node of the recorded text; no other node is
        ever drawn behind."""
        next_at = {0: self.num_kept - len(self._prompt_ids)}
        drawn = [self._token(next_at[0])]
        for node in range(1, len(tree)):
            at = next_at.get(tree.parents[node])
            if at is not None and at < len(self._answer_ids) and tree.tokens[node] == self._answer_ids[at]:
                next_at[node] = at + 1
            drawn.append(self._token(next_at.get(node, 0)))
        logits_NV = torch.full((len(tree), self._vocab_size), -inf, dtype=torch.float32)
        logits_NV[torch.arange(len(tree)), torch.tensor(drawn)] = 0.0
        return logits_NV

    def _token(self, at: int) -> int:
        return self._answer_ids[min(at, len(self._answer_ids) - 1)]

    def keep(self, nodes: Sequence[int]) -> None:
        """See ports.TargetSession."""
        self.num_kept += len(nodes)

    def close(self) -> None:
        """See ports.TargetSession."""
