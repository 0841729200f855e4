"""Trace a text token by token, each with the logits that it was drawn from.

Shapes: N nodes of a tree, V vocabulary.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

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
    """Implements ports.Target over another target; for one text at a time."""

    logits_NV: torch.Tensor
    """Logits of the last pass."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.vocab_size = target.vocab_size
        self.context_limit = target.context_limit
        self.fingerprint = target.fingerprint

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        return self._target.limits(mode)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> TargetSession:
        """See ports.Target."""
        return _TracingSession(self, self._target.open(prompt_ids, max_new_tokens, mode))


class _TracingSession:
    """Implements ports.TargetSession."""

    def __init__(self, target: TracingTarget, session: TargetSession) -> None:
        self._target = target
        self._session = session

    def score(self, tree: DraftTree) -> torch.Tensor:
        self._target.logits_NV = self._session.score(tree)
        return self._target.logits_NV

    def keep(self, nodes: Sequence[int]) -> None:
        self._session.keep(nodes)

    def close(self) -> None:
        self._session.close()
