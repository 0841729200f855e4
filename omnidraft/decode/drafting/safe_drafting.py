"""The exception boundary of drafting: no exception of a proposer ends a text.

A draft is never needed, so here every exception is caught: a bug, a broken snapshot, out of memory. After a failure the
state of the drafter's KV cache is unknown and forgotten. Texts that failed together are drafted for one by one in the
next round, so that the one at fault is found; it continues as plain decoding gives it, without drafts to its end.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omnidraft.errors import ContractError
from omnidraft.ports import (
    NO_OTHERS,
    DraftRequest,
    DraftTree,
    Metrics,
    Noise,
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


@dataclass(slots=True, eq=False)
class SafeText:
    """One text that SafeDrafting drafts for."""

    proposer: Proposer
    session: ProposerSession | None
    """None once drafting failed for it alone; it gets no more drafts."""
    root: int
    """The last emitted id."""
    is_suspect: bool = False
    """Whether drafting failed for it and others together; it is drafted for alone until that succeeds."""


@dataclass(frozen=True, slots=True)
class SafeRequest:
    """One text that a tree is drafted for; see ports.DraftRequest."""

    text: SafeText
    position: int
    limits: TreeLimits
    noise: Noise


class SafeDrafting:
    """Drafts for many texts, each with the proposer of its snapshot, and never raises."""

    def __init__(self, vocab_size: int, failures: DraftingFailures) -> None:
        """Draft for a target with a vocabulary of `vocab_size`."""
        self._vocab_size = vocab_size
        self._failures = failures

    def open(self, proposer: Proposer, request: Request) -> SafeText:
        """Begin a text."""
        text = SafeText(proposer, None, request.prompt_ids[-1])
        try:
            text.session = proposer.open(request)
        except Exception as exc:  # the boundary: see above
            self._failures.report(exc)
        return text

    def propose_all(self, requests: Sequence[SafeRequest], others: OtherTexts = NO_OTHERS) -> list[DraftTree]:
        """See ports.Proposer; an empty tree replaces one that would change the text."""
        trees = {id(each.text): DraftTree.empty(each.text.root) for each in requests}
        for group in _groups(requests):
            drafted = self._propose(group, others.with_more(len(requests) - len(group)))
            trees |= {id(each.text): tree for each, tree in drafted if self._is_harmless(each, tree)}
        return [trees[id(each.text)] for each in requests]

    def observe_all(self, emitted: Sequence[tuple[SafeText, Sequence[int]]]) -> None:
        """See ports.Proposer. Texts are observed one by one, so that a failure costs no other text its drafts."""
        for text, ids in emitted:
            text.root = ids[-1]
            if text.session is not None:
                try:
                    text.proposer.observe_all([(text.session, ids)])
                except Exception as exc:  # the boundary: see above
                    self._fail([text], exc)

    def pause(self, text: SafeText) -> None:
        """See ports.ProposerSession."""
        self._call(text, lambda session: session.pause())

    def reset(self, text: SafeText) -> None:
        """See ports.ProposerSession."""
        self._call(text, lambda session: session.reset())

    def close(self, text: SafeText) -> None:
        """See ports.ProposerSession."""
        self._call(text, lambda session: session.close())

    def _propose(self, group: Sequence[SafeRequest], others: OtherTexts) -> list[tuple[SafeRequest, DraftTree]]:
        """Return the trees of texts that are drafted for together; none after a failure."""
        requests = [
            DraftRequest(each.text.session, each.position, each.limits, each.noise)
            for each in group
            if each.text.session is not None
        ]
        try:
            drafted = list(zip(group, group[0].text.proposer.propose_all(requests, others), strict=True))
        except Exception as exc:  # the boundary: see above
            self._fail([each.text for each in group], exc)
            return []
        for each in group:
            each.text.is_suspect = False
        return drafted

    def _is_harmless(self, request: SafeRequest, tree: DraftTree) -> bool:
        try:
            require_harmless(tree, request.text.root, request.limits, self._vocab_size)
        except Exception as exc:  # the boundary: see above
            self._fail([request.text], exc)
            return False
        return True

    def _fail(self, texts: Sequence[SafeText], error: Exception) -> None:
        """Report the exception and forget the KV caches, whose state is unknown."""
        self._failures.report(error)
        for text in texts:
            text.is_suspect = True
            session = text.session
            if len(texts) == 1:
                text.session = None
            if session is not None:
                try:
                    session.reset()
                except Exception:  # the boundary: see above; the failure is reported
                    text.session = None

    def _call(self, text: SafeText, call: Callable[[ProposerSession], None]) -> None:
        try:
            if text.session is not None:
                call(text.session)
        except Exception as exc:  # the boundary: see above
            self._fail([text], exc)


def _groups(requests: Sequence[SafeRequest]) -> list[list[SafeRequest]]:
    """Return the texts that are drafted for together: those of one proposer, suspects alone, failed ones not at all."""
    groups: dict[tuple[int, int], list[SafeRequest]] = {}
    for each in requests:
        if each.text.session is not None:
            alone = id(each.text) if each.text.is_suspect else 0
            groups.setdefault((id(each.text.proposer), alone), []).append(each)
    return list(groups.values())


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
