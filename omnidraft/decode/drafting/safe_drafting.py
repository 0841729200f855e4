"""The exception boundary of drafting: no exception of a proposer ends a text.

A draft is never needed, so here, and in the rounds of other engines (external/round_scheduler.py), every exception is
caught: a bug, a broken snapshot, out of memory. The text continues as plain decoding gives it, without drafts to its
end, because after a failure the state of the drafter's KV cache is unknown; the next text drafts again.
"""

import logging
import time
from collections.abc import Callable, Sequence

from omnidraft.errors import ContractError
from omnidraft.ports import DraftTree, Metrics, Noise, Proposer, ProposerSession, Request, TreeLimits

logger = logging.getLogger(__name__)

_OUTAGE_S = 60.0
"""Failures that are no further apart belong to one outage."""


class DraftingFailures:
    """Counts every failure and logs every outage once. Any thread may report one."""

    def __init__(
        self, metrics: Metrics | None = None, target: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Log failures only where `metrics` is None."""
        self._metrics, self._target, self._clock = metrics, target, clock
        self._last_s: float | None = None

    def report(self, error: Exception) -> None:
        """Count an exception that drafting raised; log it when it begins an outage."""
        if self._metrics is not None:
            self._metrics.add("omnidraft_drafting_failures_total", target=self._target)
        last_s, self._last_s = self._last_s, self._clock()
        if last_s is None or self._last_s - last_s > _OUTAGE_S:
            logger.error(
                "drafting for %s failed; texts go on without drafts, which is slower and changes none of them. Further "
                "failures are only counted, in omnidraft_drafting_failures_total, until there was none for %d s. If "
                "they go on, roll back to the previous snapshot or serve with decode.num_draft_tokens = 0",
                self._target or "the target",
                _OUTAGE_S,
                exc_info=error,
            )


class SafeDrafting:
    """Implements ports.ProposerSession over another proposer's session, and never raises."""

    def __init__(self, proposer: Proposer, request: Request, vocab_size: int, failures: DraftingFailures) -> None:
        """Open the proposer's session; `vocab_size` is the target's."""
        self._vocab_size, self._failures = vocab_size, failures
        self._root = request.prompt_ids[-1]
        self._session: ProposerSession | None = None
        try:
            self._session = proposer.open(request)
        except Exception as exc:  # the boundary: see above
            self._stop(exc)

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        """See ports.ProposerSession; an empty tree replaces one that would change the text."""
        if self._session is None:
            return DraftTree.empty(self._root)
        try:
            tree = self._session.propose(position, limits, noise)
            require_harmless(tree, self._root, limits, self._vocab_size)
        except Exception as exc:  # the boundary: see above
            self._stop(exc)
            return DraftTree.empty(self._root)
        return tree

    def observe(self, emitted: Sequence[int]) -> None:
        """See ports.ProposerSession."""
        self._root = emitted[-1]
        if self._session is None:
            return
        try:
            self._session.observe(emitted)
        except Exception as exc:  # the boundary: see above
            self._stop(exc)

    def _stop(self, error: Exception) -> None:
        self._session = None
        self._failures.report(error)


def require_harmless(tree: DraftTree, root: int, limits: TreeLimits, vocab_size: int) -> None:
    """Raise ContractError for a tree that would change the text or leave the target's memory."""
    if tree.tokens[0] != root:
        raise ContractError(f"the tree's root is token {tree.tokens[0]}, but {root} was emitted last")
    if not tree.fits(limits):
        raise ContractError(f"a tree of {len(tree) - 1} drafted nodes does not fit {limits}")
    if not 0 <= min(tree.tokens) <= max(tree.tokens) < vocab_size:
        raise ContractError(f"the tree has token {max(tree.tokens)}, the vocabulary ends before {vocab_size}")
    if len(set(zip(tree.parents[1:], tree.tokens[1:], strict=True))) < len(tree) - 1:
        raise ContractError("two siblings of the tree are the same token")
    if not all(0 <= parent < node for node, parent in enumerate(tree.parents[1:], 1)):
        raise ContractError("a node of the tree stands before its parent")
