"""The draft token that is spelled most like a target token, by edit distance: what MinED maps vocabularies with.

Shapes: T target ids, Q target ids that are looked up, D draft ids that have bytes.
Source: minimum edit distance, Wan et al., https://arxiv.org/abs/2401.10491 (FuseLLM), section 3.3; one of the baselines
of ALM, https://arxiv.org/abs/2503.20083.
"""

import numpy as np

from omnidraft import extras
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.tokenizer import Vocabulary

_QUERIES = 64
"""Target tokens that are compared with all draft tokens at a time: 3 MB of distances for each."""


class NearestTokens:
    """The map of one vocabulary pair, which grows as tokens are looked up: all of them would take minutes."""

    def __init__(self, alignment: Alignment, draft: Vocabulary, target: Vocabulary) -> None:
        """Raises ExtraMissing without rapidfuzz."""
        extras.require_package("rapidfuzz", "the loss mined")
        self._target = target
        self._nearest_T = alignment.direct_draft_T.copy()
        has_bytes_T = target.num_bytes[: len(self._nearest_T)] > 0
        self._is_known_T = (self._nearest_T < alignment.num_draft) | ~has_bytes_T
        self._draft_ids_D = np.flatnonzero(draft.num_bytes > 0)
        self._draft_texts = [draft.token_bytes[each].decode("latin-1") for each in self._draft_ids_D]

    def of(self, target_ids: np.ndarray) -> np.ndarray:
        """Return the draft token of each target id [T], int64, num_draft where there is none. Correct for direct
        tokens, and for all that were looked up so far, these ids among them."""
        new_Q = np.unique(target_ids[target_ids < len(self._nearest_T)])
        new_Q = new_Q[~self._is_known_T[new_Q]]
        for start in range(0, len(new_Q), _QUERIES):
            part_Q = new_Q[start : start + _QUERIES]
            self._nearest_T[part_Q] = self._search(part_Q)
        self._is_known_T[new_Q] = True
        return self._nearest_T

    def _search(self, ids_Q: np.ndarray) -> np.ndarray:
        """Return the nearest draft token of each id, the lowest of equally near ones."""
        from rapidfuzz.distance import Levenshtein
        from rapidfuzz.process import cdist

        texts = [self._target.token_bytes[each].decode("latin-1") for each in ids_Q]
        distance_QD = cdist(texts, self._draft_texts, scorer=Levenshtein.distance, dtype=np.uint16, workers=-1)
        nearest_Q: np.ndarray = self._draft_ids_D[distance_QD.argmin(axis=1)]
        return nearest_Q
