"""Trace a text token by token, each with the logits that it was drawn from.

Shapes: N nodes of a tree, V vocabulary.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.ports import DraftTree, Mode, Proposer, Request, Target, TreeLimits


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
                if output.sequence is not sequence:
                    if output.sequence.is_finished or output.error is not None:
                        again = beside.pop(output.sequence)
                        beside[tracing.add(again, proposer, cache_scope=scope)] = again
                    continue
                if output.error is not None:
                    raise output.error
                step = output.step
                assert step is not None
                if stats is not None:
                    stats.take(step)
                nodes = (0, *step.path)[: len(step.emitted)]
                for token, node in zip(step.emitted, nodes, strict=True):
                    yield TracedToken(token, target.logits[id(step.tree)][node])
    finally:
        tracing.close()


class WrappedTarget:
    """Implements ports.Target by another target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.vocab_size, self.context_limit = target.vocab_size, target.context_limit
        self.first_context = target.first_context
        self.fingerprint, self.max_rows = target.fingerprint, target.max_rows

    def limits(self, mode: Mode) -> TreeLimits:
        return self._target.limits(mode)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> Any:
        return self._target.open(prompt_ids, max_new_tokens, mode)

    def forward(
        self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor]:
        return self._target.forward(trees, prompts)

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        return self._target.reuse(session, source, num_ids)

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        return self._target.kv_bytes(num_ids, mode)


class TracingTarget(WrappedTarget):
    """Records the passes of another target."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.logits: dict[int, torch.Tensor] = {}
        """The logits [N, V] of each tree of the last round, by the tree's identity."""

    def forward(
        self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor]:
        logits = super().forward(trees, prompts)
        self.logits |= {id(tree): each for (_, tree), each in zip(trees, logits, strict=True)}
        return logits
