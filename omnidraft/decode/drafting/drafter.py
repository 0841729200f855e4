"""Drafting with a small model that has another vocabulary: chains, their runners-up, and branches that pay.

Each step extends the prefixes that the round's plan selects among those of all texts, in one batch.
Shapes: D the drafter's vocabulary, R rows of one text in a step.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, NoiseCoupling
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.drafter_context import DrafterContext
from omnidraft.decode.drafting.drafter_session import LAST_IDS, DrafterSession, ValuedPrefix
from omnidraft.decode.drafting.loaded_factors import LoadedFactors
from omnidraft.decode.drafting.ranking import rank_tokens
from omnidraft.decode.drafting.session_pool import SessionPool
from omnidraft.decode.drafting.token_healing import TokenHealing
from omnidraft.decode.drafting.token_mapping import DraftPrefix
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.ports import DraftModel, DraftSession, RankTokens, Request, RoundPlan
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary


@dataclass(frozen=True, slots=True)
class Drafter:
    """Implements tree_proposer.DraftSource: one snapshot's weights and n-gram cache, and the noise weight that fits
    them."""

    model: DraftModel
    tokenizer: Tokenizer
    target_vocabulary: Vocabulary
    alignment: Alignment
    cache: NgramCache
    noise_coupling: NoiseCoupling
    step_s: CostCurve | None = None
    """Updated with the duration of each step; None measures nothing."""
    pool: SessionPool = field(default_factory=SessionPool)
    factors: LoadedFactors | None = None
    """Opens the sessions of tenants that have factors of their own; None: all draft with the shared weights alone."""
    healing: TokenHealing | None = None
    """None drafts behind every line break as it is."""
    extends_to_depth: bool = False
    """Whether it extends its chain to the limit also where another source's chain has as many nodes as are scored."""
    max_read_s: float | None = None
    """Seconds that texts wait in a round for the reading of others; None, or steps that are not measured: for all."""
    rank: RankTokens = rank_tokens

    @property
    def num_read_beside(self) -> int | None:
        """The number of ids that a round reads where other texts wait, at least those of a text's end; None: all."""
        if self.max_read_s is None or self.step_s is None:
            return None
        return max(bisect_right(range(1, self.model.context_limit), self.max_read_s, key=self.step_s), LAST_IDS)

    def context(self, request: Request) -> DrafterContext:
        """Return the drafter's view of a request's text."""
        words = self.tokenizer, self.target_vocabulary, self.alignment
        return DrafterContext(request, *words, self.cache, limit=self.model.context_limit)

    def open(self, request: Request, calibrator: AcceptanceCalibrator) -> DrafterSession:
        """See tree_proposer.DraftSource."""
        return DrafterSession(self, request, calibrator)

    def extend_all(
        self, sessions: Sequence[DrafterSession], drafts: Sequence[DraftTreeBuilder], plan: RoundPlan
    ) -> None:
        """See tree_proposer.DraftSource."""
        readers = [session for session, draft in zip(sessions, drafts, strict=True) if session.begin_round(draft, plan)]
        if readers:
            _Steps(self, drafts, plan).run(readers)


class _Steps:
    """The drafter's steps of one round."""

    def __init__(self, drafter: Drafter, drafts: Sequence[DraftTreeBuilder], plan: RoundPlan) -> None:
        self._drafter = drafter
        self._drafts = drafts
        self._plan = plan
        self._step_started = time.perf_counter()
        self._seconds: dict[int, list[float]] = {}
        """What the steps over so many rows took."""

    def run(self, readers: Sequence[DrafterSession]) -> None:
        """Step until no further step pays."""
        model, at_end = self._drafter.model, [(each.open_value(each.start), each, each.start) for each in readers]
        readers = self._read_long(list(self._select(at_end)))
        if not readers:
            return
        starts, requests = {each: [each.start] for each in readers}, [each.read() for each in readers]
        self._step(starts, requests, model.prefill_or_extend_all)
        for each in readers:
            each.count_read()
        while selected := self._select([each for reader in readers for each in reader.best_prefixes()]):
            branches = [session.branch(prefixes) for session, prefixes in selected.items()]
            self._step(selected, branches, model.branch_all)
        if self._drafter.step_s is not None:
            for rows, seconds in self._seconds.items():
                self._drafter.step_s.update(rows, sum(seconds) / len(seconds))

    def _select(self, prefixes: list[ValuedPrefix]) -> dict[DrafterSession, list[DraftPrefix]]:
        """Return the prefixes that the plan extends, by their texts."""
        if not prefixes:
            return {}
        best = sorted(prefixes, key=itemgetter(0), reverse=True)
        selected: dict[DrafterSession, list[DraftPrefix]] = {}
        num_selected = self._plan.select_expansions([value for value, *_ in best], self._num_scored())
        for _, session, prefix in best[:num_selected]:
            selected.setdefault(session, []).append(prefix)
        return selected

    def _num_scored(self) -> int:
        """Return the number of nodes that the target would score if nothing more were drafted: a further one costs what
        a row beside those costs, however many unlikely ones a memory has drafted."""
        values = [draft.best_values(draft.limits.num_nodes) for draft in self._drafts]
        ranked = sorted(chain.from_iterable(values), reverse=True)
        return self._plan.prune([value for value, _ in ranked], [acceptance for _, acceptance in ranked])

    def _read_long(self, readers: Sequence[DrafterSession]) -> Sequence[DrafterSession]:
        """Return the texts that can be read to their ends now. Where others wait, long ones are read in pieces, one
        text after another, and drafted for afterwards."""
        num_ids = None if len(self._drafts) == 1 else self._drafter.num_read_beside
        if num_ids is None:
            return readers
        short = []
        for each in readers:
            num_missed = each.num_missed(each.ids)
            if num_missed <= max(num_ids, LAST_IDS):
                short.append(each)
            elif num_ids >= LAST_IDS:
                self._read_piece(each, num_ids)
            num_ids = max(num_ids - num_missed, 0)
        return short

    def _read_piece(self, reader: DrafterSession, num_ids: int) -> None:
        """Read so many ids of a text. This is no step of the round: the plan has weighed the reading of the whole, and
        no drafts come of a piece."""
        started = time.perf_counter()
        model, keep, missed = reader.read()
        self._drafter.model.prefill_or_extend_all([(model, keep, missed[:num_ids])])
        reader.draft.num_read_before, num_left = num_ids, len(missed) - num_ids
        reader.count_read(num_left)
        self._step_started = time.perf_counter()
        reader.draft.draft_s += self._step_started - started

    def _step(
        self,
        extended: Mapping[DrafterSession, Sequence[DraftPrefix]],
        requests: Sequence[tuple[DraftSession, Any, Sequence[int]]],
        compute: Callable[[Any], list[np.ndarray]],
    ) -> None:
        """Extend these prefixes by what the model computes for the request of each text, whose last part is as long as
        the text has rows. The seconds of the model count for the texts by their rows; those since the last step ended,
        with what choosing and adding candidates takes, are what a step takes."""
        started = time.perf_counter()
        logits = compute(requests)
        num_rows = {session.draft.index: len(rows) for session, (*_, rows) in zip(extended, requests, strict=True)}
        total = sum(num_rows.values())
        row_s = (time.perf_counter() - started) / total
        for draft in self._drafts:
            draft.step_rows.append(num_rows.get(draft.index, 0))
            draft.draft_s += row_s * draft.step_rows[-1]
        for (session, prefixes), rows in zip(extended.items(), logits, strict=True):
            session.expand_all(prefixes, rows)
        started, self._step_started = self._step_started, time.perf_counter()
        if max(num_rows.values()) <= LAST_IDS:
            self._seconds.setdefault(total, []).append(self._step_started - started)
