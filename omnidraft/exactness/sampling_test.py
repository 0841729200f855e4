"""The sampling test: first and second tokens of many seeds, by the whole loop, against plain decoding's probabilities.

The second token is tested together with the first, for the likeliest first tokens; texts that begin with another token
end there. Exact probabilities come from one-row passes, processors applied; where drafting passes round differently,
the total variation between both distributions is computed and allowed for.
Shapes: V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.exactness.caching_target import CachingProposer, CachingTarget
from omnidraft.exactness.compare import token_probabilities
from omnidraft.exactness.distribution_test import MIN_EXPECTED, Cell, DistributionTest, total_variation, tv_limit
from omnidraft.exactness.rounding import logit_difference
from omnidraft.ports import DraftTree, Proposer, Request

MAX_FIRST_TOKENS = 6


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
