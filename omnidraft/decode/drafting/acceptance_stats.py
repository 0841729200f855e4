"""Measured acceptance of draft tokens, which estimates that of the next ones, and the noise weight that drafts best.

A source's own probability (q) is only the prior: a bin of q whose tokens were accepted 60 times in 100 counts as 0.6.
Old observations fade, so that the estimates follow the traffic.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from omnidraft.ports import Source, Work

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_DEEP = (2, 3, 5)
_PRIOR_COUNT = 6.0
"""Observations that a source's own q counts for."""
_MAX_COUNT = 400.0
_MIN_ESTIMATE, _MAX_ESTIMATE = 0.001, 0.995
_DECAY = 0.99
_MAX_STREAMS = 512
"""Tenants and kinds of requests with counts of their own; the least recently seen one is dropped."""


Memory = Literal["text", "recent", "fleet", "aligned", "predicted", "changed"]
"""Where a suffix was found: in the same text, among the worker's recent ones, in the fleet's memory; or with changes in
the same text or a prediction, the last token equal (aligned, predicted) or not (changed)."""


class MatchBin(NamedTuple):
    """Matches of the suffix memory that are counted together."""

    memory: Memory
    length_bin: int
    """The bin of the number of tokens that match, or of the alignment's score."""
    count_bin: int
    """The bin of the number of occurrences."""


def temperature_bin(temperature: float) -> float:
    """Return the temperatures that are counted together: to one decimal, and all above 2, however many clients name."""
    return min(round(temperature, 1), 2.0)


class CandidateKind(NamedTuple):
    """Draft tokens that are counted together, besides their bin of q."""

    source: Source
    rank: int
    """0 is the source's first choice."""
    style: tuple[float, float] = (0.0, 0.0)
    """The bin of the temperature, and the weight of the noise in the ranking."""
    match: MatchBin | None = None
    """None where no memory drafted it."""


_Counts = dict[tuple[CandidateKind, int], list[list[float]]]
"""Kind and bin of q -> how many were seen and accepted, at any depth first, then in each bin of depths."""


class AcceptanceCalibrator:
    """Acceptance by kind, bin of q and depth."""

    def __init__(self, shared: "AcceptanceCalibrator | None" = None) -> None:
        """Begin with no counts, and with the estimates of `shared`, which counts everything that this one does."""
        self._counts: _Counts = {}
        self._all_counts: tuple[_Counts, ...] = (*(() if shared is None else shared._all_counts), self._counts)
        """Those that estimates begin with come first."""

    def estimate(self, kind: CandidateKind, q: float, depth: int) -> float:
        """Return the probability that such a draft token is accepted, given that everything before it was."""
        key, depth_bin, estimate = (kind, bisect(_EDGES, q)), 1 + bisect(_DEEP, depth), q
        for counts in self._all_counts:
            if (by_depth := counts.get(key)) is not None:
                for num_seen, num_accepted in (by_depth[0], by_depth[depth_bin]):
                    estimate = (num_accepted + _PRIOR_COUNT * estimate) / (num_seen + _PRIOR_COUNT)
        return min(max(estimate, _MIN_ESTIMATE), _MAX_ESTIMATE)

    def update(self, kind: CandidateKind, q: float, depth: int, *, is_right: bool) -> None:
        """Count one draft token that the target accepted or rejected."""
        key, depth_bin = (kind, bisect(_EDGES, q)), 1 + bisect(_DEEP, depth)
        for all_counts in self._all_counts:
            by_depth = all_counts.setdefault(key, [])
            if not by_depth:
                by_depth += [[0.0, 0.0] for _ in range(len(_DEEP) + 2)]
            for counts in (by_depth[0], by_depth[depth_bin]):
                fade = min(1.0, _MAX_COUNT / (counts[0] + 1))
                counts[0] = counts[0] * fade + 1
                counts[1] = counts[1] * fade + is_right


class Calibrators:
    """The calibrators of one snapshot: one for each text, over one for each tenant and kind of work, over one for all
    tenants, so that what is drafted badly in one text, or for one tenant, is not given up for others."""

    def __init__(self) -> None:
        """Begin without counts."""
        self._for_all = lru_cache(None)(lambda work: AcceptanceCalibrator())
        self.of: Callable[[str, Work], AcceptanceCalibrator] = lru_cache(_MAX_STREAMS)(
            lambda tenant, work: AcceptanceCalibrator(self._for_all(work))
        )
        """That of a tenant's requests of this kind."""

    def of_new_text(self, tenant: str, work: Work) -> AcceptanceCalibrator:
        """Return the calibrator of a text of this tenant and kind."""
        return AcceptanceCalibrator(self.of(tenant, work))


class NoiseCoupling:
    """Chooses the drafter's weight of the target's noise (w of docs/algorithms.md section 4) by measured agreement.

    At every scored position the first candidate of each weight is known, so no weight has to be tried out. Shared by
    all requests of one snapshot; temperatures, rounded to tenths, and kinds of requests are counted separately.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Use the first weight until another has agreed more often."""
        self.weights = tuple(weights)
        self._num_agreed: dict[tuple[float, Work], list[float]] = defaultdict(lambda: [0.0] * len(self.weights))

    def best(self, temperature: float, work: Work = "text") -> float:
        """Return the weight whose first candidate agreed most often of late."""
        agreed = self._num_agreed.get((round(temperature, 1), work))
        return self.weights[agreed.index(max(agreed))] if agreed else self.weights[0]

    def update(self, temperature: float, first_ids: Sequence[int | None], token: int, work: Work = "text") -> None:
        """Compare each weight's first candidate with the token that the target drew."""
        agreed = self._num_agreed[round(temperature, 1), work]
        agreed[:] = [count * _DECAY + (first == token) for count, first in zip(agreed, first_ids, strict=True)]
