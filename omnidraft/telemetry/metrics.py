"""Implementations of ports.Metrics: for processes that Prometheus scrapes, for all others, and with fixed labels."""

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from omnidraft import __version__
from omnidraft.ports import Metrics
from omnidraft.telemetry.metric_definitions import COMMON, DEFINITIONS, MetricDefinition

logger = logging.getLogger(__name__)

MAX_OBSERVED = 10_000
MAX_VERSIONS = 16
"""Values of the label `drafter_version` that a process keeps: a fleet learns for months, and the series of a version
that no longer serves do not change."""
VERSION_LABEL = "drafter_version"

_Series = tuple[str, frozenset[tuple[str, str]]]
"""The name of a metric, and its labels with their values."""
_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class _KeptVersions:
    """The versions whose series a process keeps."""

    def __init__(self) -> None:
        self._versions: dict[str, None] = {}  # oldest first

    def note(self, labels: Mapping[str, str]) -> str | None:
        """Note the version of a series; return the one seen first, to be dropped, if there are now too many."""
        version = labels.get(VERSION_LABEL)
        if version is None or version in self._versions:
            return None
        self._versions[version] = None
        if len(self._versions) <= MAX_VERSIONS:
            return None
        oldest = next(iter(self._versions))
        del self._versions[oldest]
        return oldest


class PrometheusMetrics:
    """Metrics in a Prometheus registry of their own, with the memory and processor time of this process."""

    def __init__(self, definitions: Mapping[str, MetricDefinition] = DEFINITIONS, targets: Iterable[str] = ()) -> None:
        """
        Args:
            definitions: the metrics of the process's role; those of all roles are added.
            targets: values of the label `target`, for counters that begin at 0.
        """
        self._definitions = {**COMMON, **definitions}
        self._registry = CollectorRegistry()
        self._metrics = {name: self._register(name, metric) for name, metric in self._definitions.items()}
        self._lock = Lock()  # over _versions
        self._versions = _KeptVersions()
        self._children: dict[object, Any] = {}  # decoding uses the same children in every pass
        ProcessCollector(registry=self._registry)
        self._begin_at_zero(tuple(targets))
        self.set("omnidraft_build_info", 1, version=__version__)

    @property
    def registry(self) -> CollectorRegistry:
        """The registry, for a server that exposes it."""
        return self._registry

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter."""
        if (counter := self._find(name, "counter", labels)) is not None and amount >= 0:
            counter.inc(amount)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a distribution."""
        if (histogram := self._find(name, "histogram", labels)) is not None:
            histogram.observe(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        if (gauge := self._find(name, "gauge", labels)) is not None:
            gauge.set(value)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _register(self, name: str, metric: MetricDefinition) -> MetricWrapperBase:
        buckets = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
        return _KINDS[metric.kind](name, metric.help, metric.labels, registry=self._registry, **buckets)

    def _begin_at_zero(self, targets: tuple[str, ...]) -> None:
        """Create the series of all counters whose label values are known beforehand."""
        for name, metric in self._definitions.items():
            known = {"target": targets, **metric.values}
            if metric.kind == "counter" and metric.labels and all(label in known for label in metric.labels):
                for values in itertools.product(*(known[label] for label in metric.labels)):
                    self._metrics[name].labels(*values)

    def _find(self, name: str, kind: str, labels: Mapping[str, str]) -> Any:
        """Return the child to change; None, and a warning in the log, if no such metric is defined."""
        key = (name, kind, *labels.items())
        if (child := self._children.get(key)) is None:
            child = self._children[key] = self._child(name, kind, labels)
        return child

    def _child(self, name: str, kind: str, labels: Mapping[str, str]) -> Any:
        metric = self._definitions.get(name)
        if metric is None or metric.kind != kind or set(labels) != set(metric.labels):
            logger.warning("no %s %s with labels %s is defined", kind, name, sorted(labels))
            return None
        with self._lock:
            dropped = self._versions.note(labels)
        if dropped is not None:
            self._remove(dropped)
        return self._metrics[name].labels(**labels) if labels else self._metrics[name]

    def _remove(self, version: str) -> None:
        for name, metric in self._definitions.items():
            if VERSION_LABEL in metric.labels:
                self._metrics[name].remove_by_labels({VERSION_LABEL: version})
        self._children.clear()


class CountingMetrics:
    """Metrics in memory, for tests and for processes that nobody scrapes. They take any name."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: dict[_Series, float] = {}
        self._observed: dict[_Series, deque[float]] = {}
        self._versions = _KeptVersions()

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter."""
        with self._lock:
            key = self._series(name, labels)
            self._values[key] = self._values.get(key, 0.0) + amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a distribution."""
        with self._lock:
            key = self._series(name, labels)
            self._observed.setdefault(key, deque(maxlen=MAX_OBSERVED)).append(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            key = self._series(name, labels)
            self._values[key] = value

    def value(self, name: str, **labels: str) -> float:
        """Return the value of a counter or gauge, summed over the labels that are left out; 0 if it was never set."""
        selected = set(labels.items())
        with self._lock:
            return sum(value for (known, its), value in self._values.items() if known == name and selected <= its)

    def observed(self, name: str, **labels: str) -> tuple[float, ...]:
        """Return the last MAX_OBSERVED values of a distribution, oldest first, series by series."""
        selected = set(labels.items())
        with self._lock:
            series = [values for (known, its), values in self._observed.items() if known == name and selected <= its]
        return tuple(value for values in series for value in values)

    def _series(self, name: str, labels: Mapping[str, str]) -> _Series:
        """Return the key of a series; if its version is one too many, remove the series of the one seen first."""
        if (dropped := self._versions.note(labels)) is not None:
            self._remove(dropped)
        return name, frozenset(labels.items())

    def _remove(self, version: str) -> None:
        label = (VERSION_LABEL, version)
        self._values = {key: value for key, value in self._values.items() if label not in key[1]}
        self._observed = {key: values for key, values in self._observed.items() if label not in key[1]}


class LabelledMetrics:
    """Metrics that add the same labels to every call, for a part of a process."""

    def __init__(self, metrics: Metrics, **labels: str) -> None:
        self._metrics, self._labels = metrics, labels

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self._metrics.add(name, amount, **(self._labels | labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._metrics.observe(name, value, **(self._labels | labels))

    def set(self, name: str, value: float, **labels: str) -> None:
        self._metrics.set(name, value, **(self._labels | labels))
