"""A target and a proposer that cache their results, so that many samples of a few tokens cost few passes.

The decoding loop runs unchanged; only passes that would give the same logits again are saved. Logits are cached by the
whole history of trees and kept nodes, so that a session that answers wrongly after some history is detected. A proposer
that reads the noise would make another tree for every seed; the distribution is the same with any tree, so the trees of
a few seeds serve all.
Shapes: N nodes of a tree, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from omnidraft.exactness.tracing_target import WrappedTarget
from omnidraft.models.text_session import TextSession
from omnidraft.models.text_target import SessionCalls
from omnidraft.ports import DraftTree, Mode, Noise, Proposer, ProposerSession, Request, Target, TreeLimits

MAX_ROWS = 512
NUM_TREES = 4


Opened = tuple[tuple[int, ...], int, Mode]
"""What a session was opened with."""
History = tuple[tuple[DraftTree, tuple[int, ...]], ...]
"""The trees that a session scored, each with the nodes that were kept."""
Pass = tuple[Opened, History, DraftTree]
"""All that a pass of a session can depend on."""


class CachingTarget(SessionCalls, WrappedTarget):
    """Caches the passes of another target; the oldest are evicted first. A replayed session reuses no keys."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._scored: dict[Pass, torch.Tensor] = {}

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "_CachingSession":
        """See ports.Target."""
        return _CachingSession(self, tuple(prompt_ids), max_new_tokens, mode)

    def logits(self, key: Pass) -> torch.Tensor:
        """Return the logits [N, V] of this pass, computed by a real session that replays its history."""
        opened, history, tree = key
        if key not in self._scored:
            while self._scored and sum(map(len, self._scored.values())) + len(tree) > MAX_ROWS:
                del self._scored[next(iter(self._scored))]
            session = self._target.open(*opened)
            for scored, nodes in history:
                session.score(scored)
                session.keep(nodes)
            self._scored[key] = session.score(tree)
            session.close()
        return self._scored[key]

    def cached_logits_after(self, request: Request, ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield the logits [V] after this request's prompt and these ids, from every cached pass."""
        text = (request.prompt_ids[-1], *ids)
        opened_with = (request.prompt_ids, request.max_new_tokens, request.mode)
        for (opened, history, tree), logits_NV in self._scored.items():
            if opened == opened_with:
                yield from (logits_NV[node] for node, before in enumerate(_texts(history, tree)) if before == text)


def _texts(history: History, tree: DraftTree) -> list[tuple[int, ...]]:
    """Return the ids up to each node, without the prompt except for its last id."""
    before = tuple(scored.tokens[node] for scored, nodes in history for node in nodes)
    texts = [(*before, tree.tokens[0])]
    for node in range(1, len(tree)):
        texts.append((*texts[tree.parents[node]], tree.tokens[node]))
    return texts


class _CachingSession(TextSession):
    """Implements ports.TargetSession."""

    def __init__(self, target: CachingTarget, prompt_ids: tuple[int, ...], max_new_tokens: int, mode: Mode) -> None:
        super().__init__(prompt_ids[:-1], target.limits(mode))
        self._target = target
        self._opened_with = (prompt_ids, max_new_tokens, mode)
        self._history: History = ()
        self._tree = DraftTree.empty(prompt_ids[-1])

    def _read(self, ids: Sequence[int]) -> None:
        pass

    def _score(self, tree: DraftTree) -> torch.Tensor:
        self._tree = tree
        return self._target.logits((self._opened_with, self._history, tree))

    def keep(self, nodes: Sequence[int]) -> None:
        self._history += ((self._tree, tuple(nodes)),)
        self.num_kept += len(nodes)

    def close(self) -> None:
        pass


class CachingProposer(Proposer):
    """Implements ports.Proposer for many seeds of one request."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.trees: dict[tuple[int, tuple[int, ...]], DraftTree] = {}
        """Trees by seed modulo NUM_TREES and the answer so far."""

    def open(self, request: Request) -> ProposerSession:
        """See ports.Proposer."""
        return _CachingProposerSession(self, request)


@dataclass(slots=True)
class _CachingProposerSession(ProposerSession):
    """Implements ports.ProposerSession."""

    proposer: CachingProposer
    request: Request
    requests: list[tuple[int, TreeLimits, Noise]] = field(default_factory=list)
    emitted: list[tuple[int, ...]] = field(default_factory=list)

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        before = tuple(token for ids in self.emitted for token in ids)
        key = self.request.seed % NUM_TREES, before
        self.requests.append((position, limits, noise))
        if key not in self.proposer.trees:
            self.proposer.trees[key] = self._propose_uncached()
        return self.proposer.trees[key]

    def observe(self, emitted: Sequence[int]) -> None:
        self.emitted.append(tuple(emitted))

    def _propose_uncached(self) -> DraftTree:
        """Return the tree of a real session for the last request, after replaying the earlier ones."""
        session = self.proposer.proposer.open(self.request)
        for request, emitted in zip(self.requests, self.emitted, strict=False):
            session.propose(*request)
            session.observe(emitted)
        return session.propose(*self.requests[-1])
