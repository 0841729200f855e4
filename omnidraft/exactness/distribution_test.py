"""Test whether the decoding loop's samples follow plain decoding's distribution: first and second tokens of many seeds.

Total variation (TV) between counts and probabilities is held against a limit; cells with an expected count below 5 are
pooled into one. The second token is tested together with the first, for the likeliest first tokens; texts that begin
with another token end there. Exact probabilities come from one-row passes, processors applied; where drafting passes
round differently, the total variation between both distributions is computed and allowed for.
Shapes: V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.exactness.caching_target import CachingProposer, CachingTarget
from omnidraft.exactness.compare import token_probabilities
from omnidraft.exactness.rounding import logit_difference
from omnidraft.ports import DraftTree, Proposer, Request

Cell = tuple[int, ...]
"""One token, or two."""

FALSE_ALARM_PROBABILITY = 1e-6
"""Largest probability that samples of the distribution itself exceed the limit."""
MIN_EXPECTED = 5.0
MAX_FIRST_TOKENS = 6


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """The result of testing one position."""

    position: int
    """1: the first token of the answer; 2: the first two together."""
    samples: int
    cells: int
    """Number of cells, the pooled one included."""
    tv: float
    tv_limit: float
    """The limit at these odds of a false alarm, plus `rounding`."""
    rounding: float
    """Total variation between the probabilities of plain and of drafting passes, from their logits."""
    impossible: int
    """Number of samples to which no pass gives any probability."""
    logit_difference: float
    """Largest difference of one logit between the plain passes and those that drafted."""
    logit_limit: float
    odds: float = FALSE_ALARM_PROBABILITY

    @property
    def passed(self) -> bool:
        is_within_rounding = self.logit_difference <= self.logit_limit
        return self.tv <= self.tv_limit and not self.impossible and is_within_rounding


def total_variation(p: Mapping[Cell, float], counts: Mapping[Cell, int], num_samples: int) -> float:
    """Return 1/2 sum |p - counts / n|, in [0, 1]; everything outside `p` is one more cell."""
    rest = (1 - math.fsum(p.values())) - (num_samples - sum(counts.get(cell, 0) for cell in p)) / num_samples
    difference = math.fsum(abs(each - counts.get(cell, 0) / num_samples) for cell, each in p.items())
    return (difference + abs(rest)) / 2


def tv_limit(p: Mapping[Cell, float], num_samples: int, odds: float = FALSE_ALARM_PROBABILITY) -> float:
    """Return a limit that samples of these cells and the rest exceed with probability `odds` at most.

    TV of n samples drawn from p itself has a mean of at most m = 1/2 sum_c min(sqrt(p_c (1 - p_c) / n),
    2 p_c (1 - p_c)), since E|X/n - p| is bounded by the deviation of a binomial and by that of its single draws. Above
    its mean it follows both
        P(TV >= m + sqrt(x / 2n)) <= e^-x                           (McDiarmid 1989: a sample moves TV by 1/n)
        P(TV >= m + sqrt(2x (s + 2m) / n) + x / 3n) <= e^-x         (Bousquet 2002, theorem 2.3)
    where s is the largest variance P(A) (1 - P(A)) of any set of cells: tighter where one cell has most of the mass.
    """
    cells = [*p.values(), max(0.0, 1 - math.fsum(p.values()))]
    n, x = num_samples, -math.log(odds)
    mean = math.fsum(min(math.sqrt(each * (1 - each) / n), 2 * each * (1 - each)) for each in cells if each < 1) / 2
    likeliest = max(cells)
    variance = likeliest * (1 - likeliest) if likeliest > 0.5 else 0.25
    bousquet = math.sqrt(2 * x * (variance + 2 * mean) / n) + x / (3 * n)
    return min(1.0, mean + min(math.sqrt(x / (2 * n)), bousquet))


@dataclass(frozen=True, slots=True)
class _Reference:
    """The reference probabilities after one text."""

    p_V: np.ndarray
    """Probabilities of plain decoding."""
    possible_V: np.ndarray
    """True for tokens to which some pass gives any probability."""
    rounding: float
    """Largest total variation between plain's probabilities and those of another pass."""
    logit_difference: float


class SamplingTest:
    """Tests one request of one decoder and proposer. Passes are cached across tests and temperatures."""

    def __init__(self, decoder: Decoder, proposer: Proposer) -> None:
        self._target = CachingTarget(decoder.target)
        self._decoder = decoder.with_target(self._target)
        self._proposer = proposer

    def highest_entropy(self, requests: Sequence[Request]) -> Request:
        """Return the request whose first token has the highest entropy: a nearly certain token tests little."""
        return max(requests, key=lambda request: _entropy(self._plain_logits(_shortened(request), ())))

    def run(
        self, request: Request, num_samples: int, *, rounding: float, on_progress: Callable[[], None] = lambda: None
    ) -> list[DistributionTest]:
        """Test both positions; the request's seed is the first of `num_samples` seeds.

        Args:
            rounding: logits of two passes over one text may differ by this much.
            on_progress: called after each sample.
        """
        request = _shortened(request)
        continued = _likeliest(_probabilities(request, (), self._plain_logits(request, ())), request)
        counts = Counter(self._samples(request, num_samples, continued, on_progress))
        expected = {ids: self._expected(request, ids) for ids in [(), *((token,) for token in continued)]}
        return [
            _distribution(position, expected, counts, num_samples, logit_limit=rounding)
            for position in (1, 2)
            if position == 1 or continued
        ]

    def _samples(
        self, request: Request, num_samples: int, continued: Sequence[int], on_progress: Callable[[], None]
    ) -> Iterator[Cell]:
        """Yield the first two tokens of each seed; only the first where it is not continued, or ends the text."""
        proposer = CachingProposer(self._proposer)
        for seed in range(request.seed, request.seed + num_samples):
            ids: tuple[int, ...] = ()
            for step in self._decoder.decode(replace(request, seed=seed), proposer):
                ids += step.emitted
                if len(ids) >= 2 or ids[0] not in continued:
                    break
            on_progress()
            yield ids[:2] if ids[0] in continued else ids[:1]

    def _plain_logits(self, request: Request, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [V] after these ids by one-row passes."""
        session = self._target.open(request.prompt_ids, request.max_new_tokens, request.mode)
        rows = []
        for token in (request.prompt_ids[-1], *ids):
            rows.append(session.score(DraftTree.empty(token))[0])
            session.keep((0,))
        return rows[-1]

    def _expected(self, request: Request, ids: Sequence[int]) -> _Reference:
        plain_V = self._plain_logits(request, ids)
        p_V, rounding, difference = _probabilities(request, ids, plain_V), 0.0, 0.0
        possible_V = p_V > 0
        for row_V in self._target.cached_logits_after(request, ids):
            other_V = _probabilities(request, ids, row_V)
            possible_V |= other_V > 0
            rounding = max(rounding, float(np.abs(p_V - other_V).sum() / 2))
            difference = max(difference, logit_difference(row_V, plain_V))
        return _Reference(p_V, possible_V, rounding, difference)


def _shortened(request: Request) -> Request:
    """Return the request, only as long as trees of full size need."""
    return replace(request, max_new_tokens=request.num_draft_tokens + 2)


def _entropy(logits_V: torch.Tensor) -> float:
    """Return the entropy in nats at temperature 1."""
    log_p_V = torch.log_softmax(logits_V.double(), dim=-1)
    return float(-(log_p_V.exp() * log_p_V.clamp(min=-1e9)).sum())


def _probabilities(request: Request, ids: Sequence[int], logits_V: torch.Tensor) -> np.ndarray:
    """Return the probabilities [V] of all tokens after these ids of the answer, processors applied."""
    p_V = np.zeros(len(logits_V))
    possible, p_M = token_probabilities(request, ids, logits_V.float().cpu().numpy())
    p_V[possible] = p_M
    return p_V


def _likeliest(p_V: np.ndarray, request: Request) -> list[int]:
    """Return the first tokens after which texts are continued."""
    front = np.argsort(-p_V, kind="stable")[:MAX_FIRST_TOKENS]
    return [int(token) for token in front if p_V[token] > 0 and int(token) not in request.stop_ids]


def _distribution(
    position: int, expected: Mapping[Cell, _Reference], counts: Counter[Cell], num_samples: int, *, logit_limit: float
) -> DistributionTest:
    before = {ids: each for ids, each in expected.items() if len(ids) < position}
    p = _cells(position, expected, MIN_EXPECTED / num_samples)
    prefix_counts: Counter[Cell] = Counter()
    for ids, count in counts.items():
        prefix_counts[ids[:position]] += count
    rounding = sum((expected[()].p_V[ids[0]] if ids else 1.0) * each.rounding for ids, each in before.items())
    return DistributionTest(
        position=position,
        samples=num_samples,
        cells=len(p) + 1,
        tv=total_variation(p, prefix_counts, num_samples),
        tv_limit=min(1.0, tv_limit(p, num_samples) + rounding),
        rounding=min(1.0, rounding),
        impossible=sum(count for ids, count in prefix_counts.items() if not _is_possible(ids, before)),
        logit_difference=max(each.logit_difference for each in before.values()),
        logit_limit=logit_limit,
    )


def _cells(position: int, expected: Mapping[Cell, _Reference], least: float) -> dict[Cell, float]:
    """Return the cells of this position with at least this probability."""
    first_V = expected[()].p_V
    if position == 1:
        return {(int(token),): float(first_V[token]) for token in np.flatnonzero(first_V >= least)}
    cells: dict[Cell, float] = {}
    for ids, each in expected.items():
        joint_V = each.p_V * first_V[ids[0]] if ids else np.zeros(0)
        cells |= {(*ids, int(token)): float(joint_V[token]) for token in np.flatnonzero(joint_V >= least)}
    return cells


def _is_possible(ids: Cell, before: Mapping[Cell, _Reference]) -> bool:
    """Return whether some pass gives these tokens any probability, where it is known."""
    return all(ids[:at] not in before or before[ids[:at]].possible_V[token] for at, token in enumerate(ids))
