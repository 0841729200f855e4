"""Trace a text token by token, each with the logits that it was drawn from.

Shapes: N nodes of a tree, V vocabulary.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.ports import DraftTree, Mode, Proposer, Request, Target, TargetSession, TreeLimits


@dataclass(frozen=True, slots=True)
class TracedToken:
    """One emitted token."""

    token: int
    logits_V: torch.Tensor
    """Raw logits of the pass that the decoder drew from."""


def trace_tokens(
    decoder: Decoder, request: Request, proposer: Proposer | None, stats: DecodeStats | None = None
) -> Generator[TracedToken, None, None]:
    """Yield the tokens that this decoder emits; closing the generator ends the text early. `stats` counts its steps."""
    target = TracingTarget(decoder.target)
    for step in decoder.with_target(target).decode(request, proposer):
        if stats is not None:
            stats.take(step)
        nodes = (0, *step.path)[: len(step.emitted)]
        for token, node in zip(step.emitted, nodes, strict=True):
            yield TracedToken(token, target.logits_NV[node])


class TracingTarget:
    """Implements ports.Target over another target; it records one text at a time."""

    logits_NV: torch.Tensor
    """Logits of the last tree of the last pass."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.vocab_size = target.vocab_size
        self.context_limit = target.context_limit
        self.fingerprint = target.fingerprint
        self.max_rows = target.max_rows

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        return self._target.limits(mode)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> TargetSession:
        """See ports.Target."""
        return _TracingSession(self, self._target.open(prompt_ids, max_new_tokens, mode))

    def forward(
        self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor]:
        """See ports.Target."""
        logits = self._target.forward(
            [(session.traced, tree) for session, tree in trees],
            [(session.traced, num_ids) for session, num_ids in prompts],
        )
        if logits:
            self.logits_NV = logits[-1]
        return logits

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        """See ports.Target."""
        return self._target.reuse(session.traced, source.traced, num_ids)

    def kv_bytes(self, num_ids: int) -> int:
        """See ports.Target."""
        return self._target.kv_bytes(num_ids)


class _TracingSession:
    """Implements ports.TargetSession."""

    def __init__(self, target: TracingTarget, session: TargetSession) -> None:
        self._target = target
        self.traced = session

    @property
    def num_kept(self) -> int:
        return self.traced.num_kept

    @property
    def num_unread(self) -> int:
        return self.traced.num_unread

    def score(self, tree: DraftTree) -> torch.Tensor:
        self._target.logits_NV = self.traced.score(tree)
        return self._target.logits_NV

    def keep(self, nodes: Sequence[int]) -> None:
        self.traced.keep(nodes)

    def close(self) -> None:
        self.traced.close()
