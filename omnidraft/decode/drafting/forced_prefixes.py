"""Lets the drafter continue behind forced tokens: their bytes in its own vocabulary, boundary by boundary."""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from omnidraft.decode.drafting.draft_tree_builder import DraftTreeBuilder
from omnidraft.decode.drafting.forced_tokens import ForcedRuns
from omnidraft.decode.drafting.token_mapping import DraftPrefix
from omnidraft.errors import VocabularyError
from omnidraft.vocab.retokenise import tokenise_bytes
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

_CACHED_RUNS = 256


class ForcedPrefixes:
    """The draft prefixes behind the forced runs of one text."""

    def __init__(self, tokenizer: Tokenizer, target: Vocabulary, runs: ForcedRuns) -> None:
        """`tokenizer` is the drafter's."""
        self._draft_vocabulary, self._target, self._runs = tokenizer.vocabulary, target, runs
        self._draft_ids = lru_cache(_CACHED_RUNS)(lambda data: tuple(tokenise_bytes(tokenizer, data)))

    def behind(self, tree: DraftTreeBuilder, prefix: DraftPrefix) -> DraftPrefix | None:
        """Add what is forced after the prefix to the tree, and return the prefix behind it, which is this one where
        nothing is forced; None where the drafter cannot continue: the text ends, or the tree is at its depth."""
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
