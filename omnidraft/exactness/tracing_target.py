"""Trace a text token by token, each with the logits that it was drawn from.

Shapes: N nodes of a tree, V vocabulary.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnidraft.decode.decoder import Decoder, SequenceOutput
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.ports import DraftTree, Mode, Proposer, Request, Target, TargetSession, TreeLimits


@dataclass(frozen=True, slots=True)
class TracedToken:
    """One emitted token."""

    token: int
    logits_V: torch.Tensor
    """Raw logits of the pass that the decoder drew from."""


def trace_tokens(
    decoder: Decoder,
    request: Request,
    proposer: Proposer | None,
    stats: DecodeStats | None = None,
    companions: Sequence[Request] = (),
) -> Generator[TracedToken, None, None]:
    """Yield the tokens that this decoder emits; closing the generator ends the text early.

    Args:
        stats: counts the steps.
        companions: texts that are decoded beside it, again and again until it ends; all share a prefix cache.
    """
    target = TracingTarget(decoder.target)
    tracing = decoder.with_target(target, max_num_seqs=1 + len(companions))
    scope = "companions" if companions else None
    beside = {tracing.add(each, proposer, cache_scope=scope): each for each in companions}
    sequence = tracing.add(request, proposer, cache_scope=scope)
    try:
        while not sequence.is_finished:
            target.logits.clear()
            for output in tracing.step():
                if output.sequence is sequence:
                    yield from _traced(output, target, stats)
                elif output.sequence.is_finished or output.error is not None:
                    again = beside.pop(output.sequence)
                    beside[tracing.add(again, proposer, cache_scope=scope)] = again
    finally:
        tracing.close()


def _traced(output: SequenceOutput, target: "TracingTarget", stats: DecodeStats | None) -> Iterator[TracedToken]:
    """Yield the tokens of a step. Raises what ended the text."""
    if output.error is not None:
        raise output.error
    step = output.step
    assert step is not None
    if stats is not None:
        stats.take(step)
    nodes = (0, *step.path)[: len(step.emitted)]
    for token, node in zip(step.emitted, nodes, strict=True):
        yield TracedToken(token, target.logits[id(step.tree)][node])


class TracingTarget:
    """Implements ports.Target over another target, and records its passes."""

    def __init__(self, target: Target) -> None:
        self.logits: dict[int, torch.Tensor] = {}
        """The logits [N, V] of each tree of the last round, by the tree's identity."""
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
        self.logits |= {id(tree): each for (_, tree), each in zip(trees, logits, strict=True)}
        return logits

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        """See ports.Target."""
        return self._target.reuse(session.traced, source.traced, num_ids)

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target."""
        return self._target.kv_bytes(num_ids, mode)


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
        logits_NV = self.traced.score(tree)
        self._target.logits[id(tree)] = logits_NV
        return logits_NV

    def keep(self, nodes: Sequence[int]) -> None:
        self.traced.keep(nodes)

    def close(self) -> None:
        self.traced.close()
