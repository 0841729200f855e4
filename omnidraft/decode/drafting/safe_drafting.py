"""The exception boundary of drafting: no exception of a proposer ends a text.

A draft is never needed, so here every exception is caught: a bug, a broken snapshot, out of memory. After a failure the
state of the drafter's KV cache is unknown and forgotten. Texts that failed together are drafted for one by one at once,
so that the one at fault is found; it continues as plain decoding gives it, without drafts to its end.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from omnidraft.errors import ContractError
from omnidraft.ports import (
    NO_OTHERS,
    DraftRequest,
    DraftTree,
    Metrics,
    Mode,
    OtherTexts,
    Proposer,
    ProposerSession,
    Request,
    TreeLimits,
)

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


class SafeSession:
    """A proposer's session for one text, which raises nothing: once it has failed alone, it drafts no more."""

    def __init__(self, proposer: Proposer, request: Request, vocab_size: int, failures: DraftingFailures) -> None:
        """Begin a text of a target with a vocabulary of `vocab_size`."""
        self.proposer, self.vocab_size, self.failures, self.mode = proposer, vocab_size, failures, request.mode
        self.root = request.prompt_ids[-1]
        """The last emitted id."""
        self.session: ProposerSession | None = None
        """None once drafting failed."""
        try:
            self.session = proposer.open(request)
        except Exception as exc:  # the boundary: see above
            failures.report(exc)

    def observe(self, emitted: Sequence[int]) -> None:
        """See ports.ProposerSession."""
        self.root = emitted[-1]
        self._call(lambda session: session.observe(emitted))

    def pause(self) -> None:
        """See ports.ProposerSession."""
        self._call(lambda session: session.pause())

    def reset(self) -> None:
        """See ports.ProposerSession."""
        self._call(lambda session: session.reset())

    def close(self) -> None:
        """See ports.ProposerSession."""
        self._call(lambda session: session.close())

    def fail(self, error: Exception) -> None:
        """Report an exception and draft no more; the KV cache, whose state is unknown, is forgotten."""
        self.failures.report(error)
        session, self.session = self.session, None
        with suppress(Exception):  # the boundary: see above; the failure is reported
            if session is not None:
                session.reset()

    def _call(self, call: Callable[[ProposerSession], None]) -> None:
        try:
            if self.session is not None:
                call(self.session)
        except Exception as exc:  # the boundary: see above
            self.fail(exc)


def propose_all(requests: Sequence[DraftRequest], others: OtherTexts = NO_OTHERS) -> list[DraftTree]:
    """Return a tree for each of these texts, whose sessions are safe ones; an empty tree replaces one that would change
    its text. Those of one proposer and mode are drafted for together."""
    trees = [DraftTree.empty(each.session.root) for each in requests]
    groups: dict[tuple[int, Mode], list[int]] = {}
    for at, each in enumerate(requests):
        if each.session.session is not None:
            groups.setdefault((id(each.session.proposer), each.session.mode), []).append(at)
    for group in groups.values():
        drafted = _propose([requests[at] for at in group], others.with_more(len(requests) - len(group)))
        for at, tree in zip(group, drafted, strict=True):
            trees[at] = tree
    return trees


def _propose(requests: Sequence[DraftRequest], others: OtherTexts) -> list[DraftTree]:
    """Return the trees of texts that are drafted for together. Where that fails, each is drafted for alone, so that the
    one at fault is found."""
    first: SafeSession = requests[0].session
    inner = [DraftRequest(each.session.session, each.position, each.limits, each.noise) for each in requests]
    try:
        drafted = first.proposer.propose_all(inner, others)
        return [_harmless(each, tree) for each, tree in zip(requests, drafted, strict=True)]
    except Exception as exc:  # the boundary: see above
        if len(requests) == 1:
            first.fail(exc)
            return [DraftTree.empty(first.root)]
        first.failures.report(exc)
    for each in requests:
        each.session.reset()
    return [propose_all([each], others.with_more(len(requests) - 1))[0] for each in requests]


def _harmless(request: DraftRequest, tree: DraftTree) -> DraftTree:
    text: SafeSession = request.session
    try:
        require_harmless(tree, text.root, request.limits, text.vocab_size)
    except Exception as exc:  # the boundary: see above
        text.fail(exc)
        return DraftTree.empty(text.root)
    return tree


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
