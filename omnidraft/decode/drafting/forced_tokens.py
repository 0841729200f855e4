"""Forced tokens: what the grammar leaves no choice about is drafted without asking anybody.

Where one token only can be drawn, its acceptance is 1. Where bytes are forced (`headline"` after `{"`), the target may
spell them in several ways; the longest tokens are drafted, with measured acceptance. See docs/algorithms.md section 4.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, CandidateKind, temperature_bin
from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.token_mapping import DraftPrefix
from omnidraft.errors import VocabularyError
from omnidraft.ports import Request, Source
from omnidraft.vocab.retokenise import tokenise_bytes
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

_PRIOR = 0.95
"""Acceptance of the longest token of forced bytes, before any is measured: models spell as their tokenizers do."""
_MAX_LEAVES = 8
"""Leaves of a tree that are extended."""
_CACHED_RUNS = 256


class ForcedRuns:
    """Extends one text's trees by runs of forced tokens."""

    def __init__(self, request: Request, calibrator: AcceptanceCalibrator) -> None:
        self._calibrator = calibrator
        self._style = (temperature_bin(request.sampling.temperature), 0.0)

    def extend_leaves(self, tree: DraftTreeBuilder) -> None:
        """Add what is forced after the most probable leaves, whoever drafted them."""
        for leaf in tree.best_leaves(_MAX_LEAVES):
            self.extend(tree, leaf)

    def extend(self, tree: DraftTreeBuilder, node: int) -> list[int]:
        """Add what is forced after this node; return the nodes of the run, each the parent of the next, stop tokens
        not among them."""
        run: list[int] = []
        while tree.constraints is not None:
            ids, is_sure = tree.constraints.forced(tree.tokens_to(node))
            if tree.is_complete(node):
                self._add_ends(tree, node, ids)
                break
            child = self._add(tree, node, ids[0], is_sure, rank=0, prior=_PRIOR) if ids else None
            if child is None:
                break
            node = child
            run.append(node)
        return run

    def _add_ends(self, tree: DraftTreeBuilder, node: int, stop_ids: Sequence[int]) -> None:
        """Add the tokens of which one ends the text."""
        for rank, token in enumerate(stop_ids):
            self._add(tree, node, token, len(stop_ids) == 1, rank=1 + rank, prior=1 / len(stop_ids))

    def _add(
        self, tree: DraftTreeBuilder, node: int, token: int, is_sure: bool, *, rank: int, prior: float
    ) -> int | None:
        if is_sure:
            return tree.add(node, token, Source.FORCED, 1.0)
        kind = CandidateKind(Source.FORCED, rank, self._style)
        acceptance = self._calibrator.estimate(kind, prior, tree.nodes[node].depth + 1)
        return tree.add(node, token, Source.FORCED, acceptance, estimated_from=(kind, prior))


class ForcedPrefixes:
    """The draft prefixes behind the forced runs of one text, from which the drafter goes on: the bytes of a run in its
    own vocabulary, boundary by boundary."""

    def __init__(self, tokenizer: Tokenizer, target: Vocabulary, runs: ForcedRuns) -> None:
        """`tokenizer` is the drafter's."""
        self._draft_vocabulary, self._target, self._runs = tokenizer.vocabulary, target, runs
        self._draft_ids = lru_cache(_CACHED_RUNS)(lambda data: tuple(tokenise_bytes(tokenizer, data)))

    def behind(self, tree: DraftTreeBuilder, prefix: DraftPrefix) -> DraftPrefix | None:
        """Add what is forced after the prefix to the tree, and return the prefix behind it, which is this one where
        nothing is forced; None where the drafter cannot continue: the text ends, or the tree is at its depth."""
        if tree.constraints is None:
            return prefix
        runs = [self._runs.extend(tree, end) for end in prefix.ends]
        longest = max(runs, key=len)
        last = longest[-1] if longest else prefix.ends[0]
        if tree.is_complete(last):
            return None
        if not longest:
            return prefix
        behind = self._chain(prefix, self._spelled(tree, longest), self._ends(tree, runs))
        return None if behind is None or all(map(tree.is_deepest, behind.ends)) else behind

    def _chain(self, prefix: DraftPrefix, data: bytes, ends: dict[int, list[int]]) -> DraftPrefix | None:
        """Return the prefix that spells these bytes too, one draft id after the other; a target token that reaches
        across the end of a draft id ends no prefix there."""
        try:
            draft_ids = self._draft_ids(data)
        except VocabularyError:
            return None
        num_bytes = 0
        for draft_id in draft_ids:
            num_bytes += len(self._draft_vocabulary.token_bytes[draft_id])
            prefix = DraftPrefix(prefix, draft_id, ends=tuple(ends.get(num_bytes, ())))
        return prefix

    def _ends(self, tree: DraftTreeBuilder, runs: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Return the nodes of the runs by the number of bytes that end with them."""
        ends: dict[int, list[int]] = defaultdict(list)
        for run in runs:
            num_bytes = 0
            for node in run:
                num_bytes += len(self._target.token_bytes[tree.nodes[node].token])
                ends[num_bytes].append(node)
        return ends

    def _spelled(self, tree: DraftTreeBuilder, run: Sequence[int]) -> bytes:
        return self._target.spell(tree.nodes[node].token for node in run)
