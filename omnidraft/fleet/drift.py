"""Drift: for each tenant and kind of request a change detector over agreement.

Drafts of text under a grammar agree more often than those of free text, so that without the kind a change of the mix
would look like a drift, and the gains of one kind would hide the losses of another. A stream's values are agreements
over equally many target passes, so that short requests are no noisier than long ones. A rise is no drift: it only sets
a new level. The test is Page's (Biometrika 41, 1954) with Hinkley's running mean; ADWIN needs several times as many
values for the same fall. See docs/algorithms.md, section 9.

A drift that was announced before this process started goes on (drift_recovery.py); for the other streams the newest
traffic, which is read again after a start, restores the levels and shows the falls since.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal, get_args

from omnidraft.fleet.request_stats import RequestStats
from omnidraft.ports import Work

if TYPE_CHECKING:
    from river.drift import PageHinkley


RECENT = 10
"""The number of newest values whose mean is the present agreement."""
NEW_SNAPSHOT = 30
"""The number of values after a snapshot's first in which a fall may be attributed to it."""
PASSES_PER_VALUE = 30
"""Target passes with a draft whose agreement is one value of the stream; higher detects later and more surely."""
MIN_VALUES = 30
"""The number of values before a fall can be detected: the running mean of fewer is no level yet."""
SLACK = 0.03
"""Values up to this much below the mean do not count (delta of the test): agreement of like requests varies as much."""
THRESHOLD = 1.0
"""The sum of deviations that raises the alarm (lambda of the test); higher detects later and more surely."""
RECOVERED_SHARE = 0.9
"""The share of the former level at which a drift is over."""
SETTLED_VALUES = 200
"""After this many values without recovery the new level counts as normal."""
MOST_STREAMS = 1000
_OF_WORK: dict[Work, str] = {"text": "", "constrained": " under grammars", "tools": " with tools"}


@dataclass(frozen=True, slots=True)
class DriftChange:
    """The beginning or end of a drift of one tenant's agreement, for requests of one kind."""

    tenant: str
    work: Work
    kind: Literal["drift", "drift_over"]
    level: float
    """The mean agreement before the fall."""
    recent: float
    """The mean agreement now."""
    num_values: int
    """The number of values since the level began, for a drift; since the fall, for its end."""
    suspect: int | None = None
    """The snapshot whose first requests these were, and beside which no other fell; None: no such one is known."""

    def __str__(self) -> str:
        is_back = self.recent >= RECOVERED_SHARE * self.level
        verb = "fell" if self.kind == "drift" else "was back" if is_back else "stayed"
        why = f", with the first requests of snapshot {self.suspect}" if self.suspect is not None else ""
        return (
            f"agreement of {traffic_name(self.tenant, self.work)} {verb}: {self.level:.3f} before, {self.recent:.3f} "
            f"over the last {RECENT} of {self.num_values} values{why}"
        )


def traffic_name(tenant: str, work: Work) -> str:
    """Return what operators read of a stream."""
    name = tenant if tenant.isprintable() else repr(tenant)  # it may be whatever a request said
    return name + _OF_WORK[work]


class AgreementStream:
    """The values of one tenant's agreement for requests of one kind."""

    def __init__(self, tenant: str, work: Work = "text") -> None:
        self._tenant, self._work = tenant, work
        self._newest: deque[tuple[int | None, float]] = deque(maxlen=2 * NEW_SNAPSHOT)
        """The version and agreement of the newest values, whatever the level."""
        self._num_agreed = self._num_drafted = 0
        self._has_resumed = False
        self._fell_from: float | None = None
        """The level before the drift that there is; None without one."""
        self._reset()

    @property
    def is_drifting(self) -> bool:
        return self._fell_from is not None

    def resume_drift(self, level: float) -> None:
        """Begin in a drift that was announced before, with the level before it. Past requests are then ignored, since
        they may be from before the fall."""
        self._has_resumed, self._fell_from = True, level

    def update(self, request: RequestStats) -> DriftChange | None:
        """Add one request; return the change that it reveals, if any."""
        if self._has_resumed and request.is_past:
            return None
        self._num_agreed += request.num_agreed
        self._num_drafted += request.num_drafted
        if self._num_drafted < PASSES_PER_VALUE:
            return None
        agreement = self._num_agreed / self._num_drafted
        self._num_agreed = self._num_drafted = 0
        return self._add_value(agreement, request.version)

    def _add_value(self, agreement: float, version: int | None) -> DriftChange | None:
        self._newest.append((version, agreement))
        if len(self._recent) == RECENT:
            self._num_before += 1
            self._sum_before += self._recent[0]
        self._recent.append(agreement)
        return self._detect_fall(agreement) if self._fell_from is None else self._detect_end(self._fell_from)

    def _detect_fall(self, agreement: float) -> DriftChange | None:
        self._detector.update(agreement)
        if not self._detector.drift_detected or not self._num_before:
            return None
        level, recent = self._sum_before / self._num_before, fmean(self._recent)
        num_values = self._num_before + len(self._recent)
        self._reset()
        if recent >= level:
            return None
        self._fell_from = level
        suspect = self._find_suspect(level, recent)
        return DriftChange(self._tenant, self._work, "drift", level, recent, num_values, suspect)

    def _find_suspect(self, level: float, recent: float) -> int | None:
        """Return the snapshot with whose first values the fall came, as far as so few values show; None: there is none.

        It served none but the newest NEW_SNAPSHOT values. One that served well at first is not the cause, nor one
        beside which another, as of a worker that swaps later, fell as well.
        """
        values, middle = list(self._newest), (level + recent) / 2
        versions = [version for version, _ in values]
        for suspect in dict.fromkeys(versions):
            if suspect in (None, versions[0], *versions[:-NEW_SNAPSHOT]):
                continue
            first = [agreement for version, agreement in values[:-RECENT] if version == suspect]
            beside = [agreement for version, agreement in values[versions.index(suspect) :] if version != suspect]
            if (not first or fmean(first) < middle) and (not beside or fmean(beside) >= middle):
                return suspect
        return None

    def _detect_end(self, level: float) -> DriftChange | None:
        recent, num_values = fmean(self._recent), self._num_before + len(self._recent)
        is_back = len(self._recent) == RECENT and recent >= RECOVERED_SHARE * level
        if not is_back and num_values < SETTLED_VALUES:
            return None
        self._fell_from = None
        self._reset()
        return DriftChange(self._tenant, self._work, "drift_over", level, recent, num_values)

    def _reset(self) -> None:
        """Start a new level."""
        self._detector = _page_hinkley()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._sum_before, self._num_before = 0.0, 0


class DriftDetector:
    """The streams of one pair, by tenant and kind of request. The caller evicts those with the oldest requests."""

    def __init__(self) -> None:
        self._streams: OrderedDict[tuple[str, Work], AgreementStream] = OrderedDict()

    def resume_drift(self, tenant: str, work: Work, level: float) -> None:
        """Begin this stream in a drift that was announced before, with the mean agreement before it; one that has
        requests already stays as it is."""
        if (tenant, work) not in self._streams:
            self._stream(tenant, work).resume_drift(level)

    def update(self, request: RequestStats) -> DriftChange | None:
        """Add one request of any tenant; return the change that it reveals, if any."""
        stream = self._stream(request.tenant, request.work)
        self._streams.move_to_end((request.tenant, request.work))
        return stream.update(request)

    def evict(self) -> list[tuple[str, Work]]:
        """Forget all streams but the MOST_STREAMS with the newest requests; return those of them that drifted."""
        drifting = []
        while len(self._streams) > MOST_STREAMS:
            key, stream = self._streams.popitem(last=False)
            if stream.is_drifting:
                drifting.append(key)
        return drifting

    def is_drifting(self, tenant: str) -> bool:
        """Return whether the tenant's requests of any kind drift."""
        streams = (self._streams.get((tenant, work)) for work in get_args(Work))
        return any(stream is not None and stream.is_drifting for stream in streams)

    def _stream(self, tenant: str, work: Work) -> AgreementStream:
        return self._streams.setdefault((tenant, work), AgreementStream(tenant, work))


def _page_hinkley() -> "PageHinkley":
    """Return a fresh detector. river is slow to import, so this happens only where traffic is read."""
    from river.drift import PageHinkley

    return PageHinkley(min_instances=MIN_VALUES, delta=SLACK, threshold=THRESHOLD, mode="both")
