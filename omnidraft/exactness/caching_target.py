"""A target and a proposer that remember what they said: many samples of a few tokens cost few passes.

The loop runs as always; only work that would give the same again is spared. What was scored is remembered by the whole
history of trees and kept nodes, so that a session that answers wrongly after some history is found out. A proposer that
looks at the noise would make another tree for every seed; the law holds with any tree, so a few seeds' trees serve all.
Shapes: N nodes of a tree, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from omnidraft.ports import DraftTree, Mode, Noise, Proposer, ProposerSession, Request, Target, TreeLimits

MAX_ROWS = 512
NUM_TREES = 4


@dataclass(frozen=True, slots=True)
class _ScoredTree:
    """A tree that was scored, and what was kept of it."""

    tree: DraftTree
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _PassKey:
    """All that a pass of a session can depend on."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    mode: Mode
    history: tuple[_ScoredTree, ...]
    tree: DraftTree

    def texts(self) -> list[tuple[int, ...]]:
        """What stands before each row, without the prompt but for its last id."""
        before = tuple(each.tree.tokens[node] for each in self.history for node in each.nodes)
        texts = [(*before, self.tree.tokens[0])]
        for node in range(1, len(self.tree)):
            texts.append((*texts[self.tree.parents[node]], self.tree.tokens[node]))
        return texts


class CachingTarget:
    """Implements ports.Target over another one; the oldest of many passes are forgotten."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.vocab_size = target.vocab_size
        self.context_limit = target.context_limit
        self.fingerprint = target.fingerprint
        self._scored: dict[_PassKey, torch.Tensor] = {}

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        return self._target.limits(mode)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "_CachingSession":
        """See ports.Target."""
        return _CachingSession(self, tuple(prompt_ids), max_new_tokens, mode)

    def logits(self, asked: _PassKey) -> torch.Tensor:
        """[N, V] of this pass, by a real session that goes through all of its history."""
        if asked in self._scored:
            return self._scored[asked]
        while self._scored and sum(map(len, self._scored.values())) + len(asked.tree) > MAX_ROWS:
            del self._scored[next(iter(self._scored))]
        self._scored[asked] = self._forward(asked)
        return self._scored[asked]

    def _forward(self, asked: _PassKey) -> torch.Tensor:
        session = self._target.open(asked.prompt_ids, asked.max_new_tokens, asked.mode)
        for each in asked.history:
            session.score(each.tree)
            session.keep(each.nodes)
        logits_NV = session.score(asked.tree)
        session.close()
        return logits_NV

    def cached_logits_after(self, request: Request, ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """The logits [V] after this request's prompt and these ids, of every pass that is remembered."""
        text = (request.prompt_ids[-1], *ids)
        asked = (request.prompt_ids, request.max_new_tokens, request.mode)
        for each, logits_NV in self._scored.items():
            if (each.prompt_ids, each.max_new_tokens, each.mode) == asked:
                yield from (logits_NV[node] for node, before in enumerate(each.texts()) if before == text)


class _CachingSession:
    """Implements ports.TargetSession."""

    def __init__(self, target: CachingTarget, prompt_ids: tuple[int, ...], max_new_tokens: int, mode: Mode) -> None:
        self._target = target
        self._asked = (prompt_ids, max_new_tokens, mode)
        self._kept: tuple[_ScoredTree, ...] = ()
        self._tree = DraftTree.empty(prompt_ids[-1])

    def score(self, tree: DraftTree) -> torch.Tensor:
        self._tree = tree
        return self._target.logits(_PassKey(*self._asked, self._kept, tree))

    def keep(self, nodes: Sequence[int]) -> None:
        self._kept += (_ScoredTree(self._tree, tuple(nodes)),)

    def close(self) -> None:
        pass


class CachingProposer:
    """Implements ports.Proposer for many seeds of one request."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.trees: dict[tuple[int, tuple[int, ...]], DraftTree] = {}
        """By seed modulo NUM_TREES and the answer so far."""

    def open(self, request: Request) -> ProposerSession:
        """See ports.Proposer."""
        return _CachingProposerSession(self, request)


@dataclass(slots=True)
class _CachingProposerSession:
    """Implements ports.ProposerSession."""

    proposer: CachingProposer
    request: Request
    requests: list[tuple[int, TreeLimits, Noise]] = field(default_factory=list)
    emitted: list[tuple[int, ...]] = field(default_factory=list)

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        before = tuple(token for ids in self.emitted for token in ids)
        kind, trees = self.request.seed % NUM_TREES, self.proposer.trees
        watched = _TrackedNoise(noise)
        self.requests.append((position, limits, watched))
        if (kind, before) not in trees:
            tree = self._propose_uncached()
            trees |= {(each, before): tree for each in ([kind] if watched.is_read else range(NUM_TREES))}
        return trees[kind, before]

    def observe(self, emitted: Sequence[int]) -> None:
        self.emitted.append(tuple(emitted))

    def _propose_uncached(self) -> DraftTree:
        """The last question put to a real session, after all those before it."""
        session = self.proposer.proposer.open(self.request)
        for question, emitted in zip(self.requests, self.emitted, strict=False):
            session.propose(*question)
            session.observe(emitted)
        return session.propose(*self.requests[-1])


@dataclass(slots=True)
class _TrackedNoise:
    """Implements ports.Noise; tells whether somebody read it."""

    noise: Noise
    is_read: bool = False

    def draw(self, ids_M: np.ndarray, p_M: np.ndarray, position: int) -> int:
        self.is_read = True
        return self.noise.draw(ids_M, p_M, position)

    def exponentials(self, position: int, ids: np.ndarray) -> np.ndarray:
        self.is_read = True
        return self.noise.exponentials(position, ids)
