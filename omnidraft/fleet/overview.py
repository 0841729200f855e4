"""The status of a fleet: versions of every target, the learner's lag, dead letters, workers, and unreachable services.

A service that does not answer adds a line to the problems, and None stands for its values; the rest is still reported.
What holds by the control log (whether a pair learns, its canary, the tenants whose traffic drifts) is read anew.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from omnidraft.config import Settings
from omnidraft.errors import BusError, OmnidraftError
from omnidraft.fleet.control_log import MAX_SILENCE_S, ControlLog
from omnidraft.fleet.workers import WorkerStatus, announced, laggards, told_status
from omnidraft.ports import ControlState, Drift, LogReader, Offsets, Registry, SnapshotVersion
from omnidraft.threads import within

_T = TypeVar("_T")

ALIASES = ("champion", "challenger", "previous")
POLL_S = 2.0
AT_WORK_S = 600.0
"""The age of the newest trace record up to which workers count as running."""
LIMIT_S = 10.0
"""The wait for each registry, and for the log's first answer."""
MOST_DEAD_LETTERS = 1000
"""The number of newest dead letters of each partition whose reasons are read."""


@dataclass(frozen=True, slots=True)
class NamedVersion:
    """A version under a name: an alias, or `latest`."""

    name: str
    version: int
    created_ms: int
    num_records: int
    agreement_before: float | None
    """Held-out agreement, like agreement_after."""
    agreement_after: float | None


@dataclass(frozen=True, slots=True)
class CanaryState:
    """A canary that serves now."""

    version: int
    share: float
    """The share of the requests it serves."""


@dataclass(frozen=True, slots=True)
class DriftingTenant:
    """A tenant on whose traffic of one kind agreement fell."""

    tenant: str
    work: str
    reason: str


@dataclass(frozen=True, slots=True)
class ControlChange:
    """The last that was said under one key of the control log."""

    at_ms: int
    key: tuple[str, ...]
    version: int | None
    """The version it is about, if it is about one."""
    is_over: bool
    """Whether what was said before ended."""
    reason: str | None


@dataclass(frozen=True, slots=True)
class TargetOverview:
    """The status of one pair."""

    target: str
    standings: tuple[NamedVersion, ...] | None
    """None: the registry does not answer. Empty: nothing was published."""
    lag: Offsets | None
    """Partition -> messages of the trace topic after the newest snapshot's offsets, other targets' records included."""
    is_learning_paused: bool | None
    """None, like the next two: the control log does not answer."""
    canary: CanaryState | None
    drifting: tuple[DriftingTenant, ...] | None
    changes: tuple[ControlChange, ...] = ()
    """What the control log says of it, oldest first; empty as well when the control log does not answer."""


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The number of dead letters and the reasons of the newest."""

    number: int
    by_reason: Mapping[str, int]
    """Reason -> number among the newest MOST_DEAD_LETTERS of each partition, as far as retention has left them."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The status of the fleet at one time."""

    taken_ms: int
    targets: tuple[TargetOverview, ...]
    trace_ends: Offsets | None
    dead_letters: DeadLetters | None
    workers: tuple[WorkerStatus, ...]
    problems: tuple[str, ...]
    """The services that could not be reached, and why; empty when all answered."""
    notes: tuple[str, ...] = ()
    """What an operator should know though nothing is wrong."""


@dataclass(frozen=True, slots=True)
class OverviewSources:
    """Access to the services. Each call but that of a worker may raise an OmnidraftError; none creates anything."""

    registry: Callable[[str], Registry]
    """Opens the registry of a target and the drafter."""
    topics: Callable[[], Collection[str]]
    """Lists the topics that exist and may be used."""
    reader: Callable[[str], LogReader]
    """Opens a reader of a topic that exists."""
    worker: Callable[[str], WorkerStatus]
    """Fetches the status of the worker at a URL."""
    control: Callable[[str], ControlLog]
    """Opens the control log of a target and the drafter."""


@dataclass(frozen=True, slots=True)
class _LogStatus:
    """The contents of the log; None for each topic that could not be read."""

    trace_ends: Offsets | None = None
    newest_ms: int | None = None
    """The time of the newest trace record, if there is any."""
    dead_letters: DeadLetters | None = None
    control_states: Mapping[str, ControlState] = field(default_factory=dict)
    """Target -> state; empty when the control log could not be read."""


@dataclass(slots=True)
class _ProblemList:
    """Collects errors of services that do not answer."""

    lines: list[str] = field(default_factory=list)

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OmnidraftError, TimeoutError) as exc:
            self.lines.append(f"{what}: {exc}")


def overview(
    sources: OverviewSources, settings: Settings, workers: Sequence[str], now_ms: int, *, guess: str
) -> Overview:
    """Return the status of all targets and of the workers at these URLs, or else of those that announced themselves.
    Never raises an OmnidraftError.

    Args:
        guess: the URL of a worker where none is named or announced. So where it is not there while others write trace
            records, that is a note and no problem.
    """
    problems, notes = _ProblemList(), list[str]()
    log = _log(sources, settings, problems)
    pairs = tuple(_pair(target, sources, problems, log) for target in settings.models.targets)
    news = {} if workers else announced(log.control_states.values(), now_ms)
    statuses = [told_status(name, entry, sources.worker, now_ms) for name, entry in news.items()]
    statuses += [sources.worker(url) for url in workers or (() if news else (guess,))]
    lines = [f"worker {each.url}: {each.problem}" for each in statuses if each.problem]
    age_s = math.inf if log.newest_ms is None else (now_ms - log.newest_ms) / 1000
    if not (workers or news) and age_s <= AT_WORK_S and not any(each.served for each in statuses):
        hint = f"but a worker wrote a trace record {age_s:.0f} s ago: name it with --worker"
        notes = [f"{each}; {hint}" for each in lines]
    else:
        problems.lines += lines
    problems.lines += laggards(statuses, log.control_states)
    everything = (tuple(statuses), tuple(problems.lines), tuple(notes))
    return Overview(now_ms, pairs, log.trace_ends, log.dead_letters, *everything)


def _log(sources: OverviewSources, settings: Settings, problems: _ProblemList) -> _LogStatus:
    """Read the three topics; one that does not exist yet counts as empty. Kafka does not list topics that a login may
    not use either, such as that of dead letters for a worker's, so there it is unknown what they hold."""
    known: Collection[str] | None = None
    with problems.noted("log"):
        known = within(LIMIT_S, sources.topics)
    if known is None:
        return _LogStatus()
    log, idle = settings.log, dict.fromkeys(settings.models.targets, ControlState())
    no_offsets: Offsets = {}
    no_letters = None if log.path is None else DeadLetters(0, {})
    ends: Offsets | None = None
    newest_ms: int | None = None
    dead_letters: DeadLetters | None = None
    states: Mapping[str, ControlState] = {}
    with problems.noted("trace log"):
        ends = _read(log.traces_topic, known, sources, lambda reader: reader.end_offsets(), no_offsets)
        newest_ms = _read(log.traces_topic, known, sources, _newest_ms, None)
    with problems.noted("dead letters"):
        dead_letters = _read(log.dead_letters_topic, known, sources, _dead_letters, no_letters)
    with problems.noted("control log"):
        states = {each: _control_state(sources, each) for each in idle} if log.control_topic in known else idle
    return _LogStatus(ends, newest_ms, dead_letters, states)


def _read(
    topic: str, known: Collection[str], sources: OverviewSources, read: Callable[[LogReader], _T], default: _T
) -> _T:
    if topic not in known:
        return default
    with closing(sources.reader(topic)) as reader:
        return read(reader)


def _pair(target: str, sources: OverviewSources, problems: _ProblemList, log: _LogStatus) -> TargetOverview:
    control, ends = log.control_states.get(target), log.trace_ends
    state: tuple[bool | None, CanaryState | None, tuple[DriftingTenant, ...] | None] = (None, None, None)
    changes: tuple[ControlChange, ...] = ()
    if control is not None:
        canary = None if control.canary is None else CanaryState(control.canary.version, control.canary.share)
        state, changes = (control.is_paused, canary, _drifting(control)), _changes(control)
    versions: Sequence[SnapshotVersion] | None = None
    with problems.noted(f"registry of {target}"):
        versions = within(LIMIT_S, lambda: sources.registry(target).versions(1))
    if versions is None:
        return TargetOverview(target, None, None, *state, changes=changes)
    learned = versions[-1].manifest.offsets if versions else {}
    lag = {partition: end - learned.get(partition, 0) for partition, end in ends.items()} if ends is not None else None
    return TargetOverview(target, named_versions(versions), lag, *state, changes)


def named_versions(versions: Sequence[SnapshotVersion]) -> tuple[NamedVersion, ...]:
    """Return the versions with an alias, and the newest as `latest`; a version may appear under several names."""
    named = [(alias, version) for alias in ALIASES for version in versions if alias in version.aliases]
    return tuple(_named_version(name, version) for name, version in [*named, *(("latest", v) for v in versions[-1:])])


def _named_version(name: str, version: SnapshotVersion) -> NamedVersion:
    of = version.manifest
    return NamedVersion(
        name, version.version, version.created_ms, of.num_records, of.agreement_before, of.agreement_after
    )


def _control_state(sources: OverviewSources, target: str) -> ControlState:
    with closing(sources.control(target)) as control:
        return control.read_whole()


def _drifting(state: ControlState) -> tuple[DriftingTenant, ...]:
    drifts = [each for each in state.entries.values() if isinstance(each.value, Drift)]
    return tuple(DriftingTenant(each.key[1], each.key[2], each.reason or "") for each in drifts)


def _changes(state: ControlState) -> tuple[ControlChange, ...]:
    entries = sorted(state.entries.values(), key=lambda each: each.sequence)
    return tuple(
        ControlChange(each.at_ms, each.key, getattr(each.value, "version", None), each.value is None, each.reason)
        for each in entries
        if each.kind != "worker"
    )


def _newest_ms(reader: LogReader) -> int | None:
    """Return the time of the newest message, None without any."""
    ends, firsts = reader.end_offsets(), reader.first_offsets()
    if all(firsts.get(partition, 0) >= end for partition, end in ends.items()):
        return None
    reader.seek_back(1)
    return max((each.timestamp_ms for each in reader.poll(len(ends), POLL_S).messages), default=None)


def _dead_letters(reader: LogReader) -> DeadLetters:
    """Read to the ends of now. Raises BusError when the log is silent before them for MAX_SILENCE_S."""
    ends, firsts = reader.end_offsets(), reader.first_offsets()
    reader.seek_back(MOST_DEAD_LETTERS)
    unread = {partition for partition, end in ends.items() if firsts.get(partition, 0) < end}
    reasons, silent_s = Counter[str](), 0.0
    while unread:
        polled = reader.poll(MOST_DEAD_LETTERS, POLL_S)
        silent_s = 0.0 if polled.next_offsets else silent_s + POLL_S
        if silent_s >= MAX_SILENCE_S:
            raise BusError(f"the log gave nothing for {silent_s:.0f} s before its ends")
        reasons.update(each.headers.get("reason", b"unknown").decode(errors="replace") for each in polled.messages)
        unread -= {partition for partition, offset in polled.next_offsets.items() if offset >= ends.get(partition, 0)}
    return DeadLetters(sum(ends.values()), dict(reasons.most_common()))
