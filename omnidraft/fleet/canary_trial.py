"""The trial of a canary on live requests: its seconds per token against the champion's over the same time.

The request id alone decides which requests the canary takes, so both serve the same kind of traffic.
See docs/algorithms.md, section 11.
"""

from dataclasses import dataclass, field
from math import sqrt
from statistics import NormalDist

from omnidraft.config import ControllerSettings
from omnidraft.fleet.promotion import Decision
from omnidraft.fleet.request_stats import RequestStats
from omnidraft.stats import LEAST_REQUESTS, Ratio

TOLERANCE = 0.05
"""A canary may at least be this share slower: times of live requests differ more than predicted ones."""
TIMEOUT_S = 600.0
"""The time after which a canary is judged by the requests so far, and refused if it is still open."""
EXPECTED_REQUESTS = 10
"""The number of requests due to a canary by its share from which one that served less than LEAST_REQUESTS is taken for
one that no worker loads. By chance one of this number serves so few in 1 of 2000 trials (Poisson)."""


@dataclass(slots=True)
class _Arm:
    """Statistics of the requests that one snapshot served."""

    time: Ratio = field(default_factory=Ratio)
    agreement: Ratio = field(default_factory=Ratio)

    def update(self, request: RequestStats) -> None:
        self.time.add(request.seconds, request.num_tokens)
        self.agreement.add(request.num_agreed, request.num_drafted)


class CanaryTrial:
    """One canary, from its announcement to the verdict.

    It is compared with the champion twice at most: when both served `canary_requests`, and, where that leaves it open
    whether the canary is slower than the tolerance, once more when the time is up. Each comparison is one-sided at half
    of `1 - confidence`, so both together promote a canary that is too slow with a chance of about `1 - confidence` at
    most; looking after every request would promote it far more often. With a confidence of 0.5 the first one compares
    the measured values and leaves nothing open.
    """

    def __init__(self, version: int, champion: int, settings: ControllerSettings, now_s: float) -> None:
        self.version, self.champion = version, champion
        self._settings = settings
        self._deadline_s = now_s + TIMEOUT_S
        self._arms = {version: _Arm(), champion: _Arm()}
        self._is_open = False
        """Whether the first comparison left it open."""
        confidence = settings.confidence
        self._num_errors = NormalDist().inv_cdf((1 + confidence) / 2) if confidence > 0.5 else 0.0
        """The number of standard errors on either side of the estimate within which all is possible."""

    def update(self, request: RequestStats) -> None:
        """Count one request; those of other snapshots, and those without times, are ignored."""
        if request.version in self._arms and request.seconds > 0:
            self._arms[request.version].update(request)

    def verdict(self, now_s: float) -> Decision | None:
        """Return the decision; None while there is time left, and too few requests were served or it is open."""
        is_over = now_s >= self._deadline_s
        least = min(arm.time.num for arm in self._arms.values())
        if not is_over and (self._is_open or least < self._settings.canary_requests):
            return None
        if least < LEAST_REQUESTS:
            return self._decide_uncompared(least)
        return self._compare(is_last=is_over)

    def _decide_uncompared(self, least: int) -> Decision:
        """Refuse a canary that workers do not serve, as one that they cannot load; promote one without traffic."""
        share, num_served = self._settings.canary_share, self._arms[self.version].time.num
        num_due = self._arms[self.champion].time.num * share / (1 - share)
        if num_served < LEAST_REQUESTS and num_due >= EXPECTED_REQUESTS:
            served = f"canary: {num_served} requests in time, where about {num_due:.0f} were due by its share"
            return Decision(False, f"{served}: workers do not serve it, see omnidraft_snapshot_load_failures_total")
        return Decision(True, f"canary: {least} requests in time, nothing speaks against it")

    def _compare(self, *, is_last: bool) -> Decision | None:
        """Return the decision; None where it is open and this is not the last comparison."""
        canary, champion = self._arms[self.version], self._arms[self.champion]
        slower = canary.time.estimate / champion.time.estimate - 1
        relative = (canary.time.error / canary.time.estimate, champion.time.error / champion.time.estimate)
        error = (1 + slower) * sqrt(sum(each**2 for each in relative))
        tolerance, margin = max(TOLERANCE, self._settings.speed_tolerance), self._num_errors * error
        is_fast = slower + margin <= tolerance
        self._is_open = not is_fast and slower - margin <= tolerance
        if self._is_open and not is_last:
            return None
        reason = (
            f"canary: {slower:+.1%} +- {NormalDist().inv_cdf(0.975) * error:.1%} (95 %) seconds per token and "
            f"agreement {canary.agreement.estimate:.3f} over {canary.time.num} requests, champion "
            f"{champion.agreement.estimate:.3f} over {champion.time.num}; tolerance "
            f"{tolerance:.1%}, confidence {self._settings.confidence:.0%}"
        )
        doubt = "; too few requests to be sure" if self._is_open else ""
        return Decision(is_fast, reason + doubt, is_setback=slower > tolerance)
