"""A chain of target tokens from a drafter with another vocabulary.

The drafter's context is text: what the target emits is re-tokenised with the drafter's tokenizer, the tail only, and
the drafter's keys are cut back to the common prefix (algorithms.md section 4). The next target id t is ranked by
log q(t) / T + w G(t), where q(t) sums over all draft tokens whose first target token is t (section 3).
Shapes: D the drafter's vocabulary, V the target's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnidraft.errors import VocabularyError
from omnidraft.ports import DraftModel, DraftTree, Noise, ProposerSession, Request, Source
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.retokenise import TailTokeniser
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary


@dataclass(frozen=True, slots=True)
class _Draft:
    """One draft token and how sure the drafter was of its first target token."""

    draft_id: int
    log_q: float


class DrafterProposer:
    """Implements ports.Proposer for one snapshot: its weights and its cache stay together."""

    def __init__(
        self,
        model: DraftModel,
        tokenizer: Tokenizer,
        target_vocabulary: Vocabulary,
        alignment: Alignment,
        cache: NgramCache,
        *,
        noise_weight: float,
        min_path_probability: float,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.target_vocabulary = target_vocabulary
        self.alignment = alignment
        self.cache = cache
        self.noise_weight = noise_weight
        self.min_path_probability = min_path_probability

    def open(self, request: Request) -> ProposerSession:
        """See ports.Proposer."""
        return _Session(self, request)

    def translate(self, drafts: Sequence[_Draft], root: int) -> DraftTree:
        """Read draft tokens as target tokens: the longest n-gram the cache knows, else direct or split."""
        ids = [draft.draft_id for draft in drafts]
        tokens: list[int] = []
        sources: list[Source] = []
        log_q: list[float] = []
        at = 0
        while at < len(ids):
            length, pieces, source = self._read(ids[at:])
            tokens += pieces
            sources += [source] * len(pieces)
            log_q += [sum(draft.log_q for draft in drafts[at : at + length]), *[0.0] * (len(pieces) - 1)]
            at += length
        return DraftTree.chain(root, tokens, sources, log_q, ids)

    def _read(self, ids: Sequence[int]) -> tuple[int, tuple[int, ...], Source]:
        merged = self.cache.longest(ids)
        if merged is not None:
            return merged[0], (merged[1],), Source.MERGE
        pieces = self.alignment.pieces(ids[0])
        return 1, pieces, Source.DIRECT if len(pieces) == 1 else Source.SPLIT


class _Session:
    """Implements ports.ProposerSession."""

    def __init__(self, proposer: DrafterProposer, request: Request) -> None:
        self._proposer = proposer
        self._temperature = request.sampling.temperature
        self._stop_ids = request.stop_ids
        self._tail = TailTokeniser(proposer.tokenizer, request.drafter_prompt_ids)
        self._drafting = proposer.model.open()
        self._fed: list[int] = []
        self._root = request.prompt_ids[-1]
        self._unlearned: list[int] = []
        self._learned_to: int | None = len(self._tail.ids)
        self._is_lost = False  # the text has bytes that the drafter cannot spell: nothing more is drafted

    def propose(self, position: int, budget: int, noise: Noise) -> DraftTree:
        """A chain of at most `budget` target tokens; empty while a character is incomplete or the context is full."""
        model = self._proposer.model
        tree = DraftTree.empty(self._root)
        if self._is_lost or self._tail.pending or not self._tail.ids:
            return tree
        room = model.context_limit - len(self._tail.ids)
        drafts: list[_Draft] = []
        log_path = 0.0
        while len(tree) - 1 < budget and len(drafts) <= room:
            best = self._best(self._advance(drafts), noise, position + len(tree) - 1)
            if best is None:
                break
            drafts.append(best)
            log_path += best.log_q
            tree = self._proposer.translate(drafts, self._root)
            if tree.tokens[-1] in self._stop_ids or math.exp(log_path) < self._proposer.min_path_probability:
                break
        return _cut(tree, budget + 1)

    def observe(self, emitted: Sequence[int]) -> None:
        """Follow the target's text; what it confirmed of the earlier tokenisation teaches the cache its merges."""
        self._root = emitted[-1]
        if self._is_lost:
            return
        num_before, was_pending = len(self._tail.ids), bool(self._tail.pending)
        try:
            unchanged = self._tail.append(self._proposer.target_vocabulary.spell(emitted))
        except VocabularyError:
            self._is_lost = True
            return
        if unchanged == num_before and not was_pending:
            if self._learned_to is not None:
                self._proposer.cache.learn(self._tail.ids[self._learned_to : num_before], self._unlearned)
            self._learned_to, self._unlearned = num_before, []
        elif self._learned_to is not None and unchanged < self._learned_to:
            self._learned_to = None  # the ids before it spell another part of the text now
        special = self._proposer.target_vocabulary.special_ids
        self._unlearned += [token for token in emitted if token not in special]

    def _advance(self, drafts: Sequence[_Draft]) -> torch.Tensor:
        """The drafter's logits after the text and these drafts. [D]"""
        ids = [*self._tail.ids, *(draft.draft_id for draft in drafts)]
        keep = 0
        limit = min(len(self._fed), len(ids) - 1)
        while keep < limit and self._fed[keep] == ids[keep]:
            keep += 1
        self._fed = ids
        return self._drafting.advance(keep, ids[keep:])

    def _best(self, logits_D: torch.Tensor, noise: Noise, position: int) -> _Draft | None:
        """The draft token to go on with: the likeliest one that begins with the best-ranked target token."""
        alignment = self._proposer.alignment
        first_D = alignment.first_D[: len(logits_D)]
        q_D = torch.softmax(logits_D, dim=-1).cpu().numpy()[: len(first_D)]
        q_V = np.bincount(first_D, weights=q_D, minlength=alignment.num_target + 1)[: alignment.num_target]
        if not q_V.any():
            return None
        target_id = self._rank(q_V, noise, position)
        drafts = np.flatnonzero(first_D == target_id)
        return _Draft(int(drafts[q_D[drafts].argmax()]), math.log(q_V[target_id]))

    def _rank(self, q_V: np.ndarray, noise: Noise, position: int) -> int:
        if self._temperature == 0 or self._proposer.noise_weight == 0:
            return int(q_V.argmax())
        ids = np.flatnonzero(q_V)
        gumbel = -np.log(noise.exponentials(position, ids))
        scores = np.log(q_V[ids]) / self._temperature + self._proposer.noise_weight * gumbel
        return int(ids[scores.argmax()])


def _cut(tree: DraftTree, num_nodes: int) -> DraftTree:
    """The first nodes of a chain."""
    return DraftTree(
        tree.tokens[:num_nodes],
        tree.parents[:num_nodes],
        tree.sources[:num_nodes],
        tree.log_q[:num_nodes],
        tree.draft_ids,
    )
