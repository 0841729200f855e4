"""The comparison of a canary with the champion: seconds per token of the requests that each served meanwhile.

The request id alone decides which requests the canary takes, so both serve the same kind of traffic.
"""

from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import NormalDist

from omnidraft.config import ControllerSettings
from omnidraft.fleet.promotion_gate import Decision
from omnidraft.fleet.request_stats import RequestStats

_LEAST_REQUESTS = 2


@dataclass(slots=True)
class _Ratio:
    """The ratio of two sums over requests, with its standard error.

    Source: linearisation, Cochran, Sampling Techniques, section 6.3. Sums of squares stand in for the requests.
    """

    num: int = 0
    y: float = 0.0
    x: float = 0.0
    yy: float = 0.0
    xy: float = 0.0
    xx: float = 0.0

    def add(self, y: float, x: float) -> None:
        self.num, self.y, self.x = self.num + 1, self.y + y, self.x + x
        self.yy, self.xy, self.xx = self.yy + y * y, self.xy + x * y, self.xx + x * x

    @property
    def estimate(self) -> float:
        return self.y / self.x if self.x else 0.0

    @property
    def error(self) -> float:
        if self.num < _LEAST_REQUESTS or not self.x:
            return inf
        squares = max(self.yy - 2 * self.estimate * self.xy + self.estimate**2 * self.xx, 0.0)
        return sqrt(squares * self.num / (self.num - 1)) / self.x


@dataclass(slots=True)
class _Arm:
    """Statistics of the requests that one snapshot served."""

    time: _Ratio = field(default_factory=_Ratio)
    agreement: _Ratio = field(default_factory=_Ratio)

    def update(self, request: RequestStats) -> None:
        self.time.add(request.seconds, request.num_tokens)
        self.agreement.add(request.num_agreed, request.num_drafted)


class CanaryTrial:
    """One canary, from its announcement to the verdict."""

    def __init__(self, version: int, champion: int, settings: ControllerSettings, now_s: float, fence: str) -> None:
        """
        Args:
            fence: the registry's, from before the decision to try this version.
        """
        self.version, self.fence = version, fence
        self._champion = champion
        self._settings = settings
        self._deadline_s = now_s + settings.canary_timeout_s
        self._arms = {version: _Arm(), champion: _Arm()}

    def update(self, request: RequestStats) -> None:
        """Count one request; requests of other snapshots are ignored."""
        if request.version in self._arms:
            self._arms[request.version].update(request)

    def verdict(self, now_s: float) -> Decision | None:
        """Return the decision, or None while too few requests were served and there is time left."""
        numbers = [arm.time.num for arm in self._arms.values()]
        if min(numbers) < self._settings.canary_requests and now_s < self._deadline_s:
            return None
        if min(numbers) < _LEAST_REQUESTS:
            return Decision(True, f"canary: {min(numbers)} requests in time, nothing speaks against it")
        return self._compare()

    def _compare(self) -> Decision:
        canary, champion = self._arms[self.version], self._arms[self._champion]
        slower = canary.time.estimate / champion.time.estimate - 1
        relative = (canary.time.error / canary.time.estimate, champion.time.error / champion.time.estimate)
        error = (1 + slower) * sqrt(sum(each**2 for each in relative))
        most = slower + NormalDist().inv_cdf(self._settings.confidence) * error
        reason = (
            f"canary: {slower:+.1%} +- {NormalDist().inv_cdf(0.975) * error:.1%} (95 %) seconds per token and "
            f"agreement {canary.agreement.estimate:.3f} over {canary.time.num} requests, champion "
            f"{champion.agreement.estimate:.3f} over {champion.time.num}; tolerance "
            f"{self._settings.canary_tolerance:.1%}, confidence {self._settings.confidence:.0%}"
        )
        return Decision(most <= self._settings.canary_tolerance, reason)
