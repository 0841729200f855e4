"""The two Metrics of ports: Prometheus for processes that are scraped, a counting one for all others."""

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
from omnidraft.telemetry.metric_definitions import COMMON, TABLE, Metric

logger = logging.getLogger(__name__)

MOST_OBSERVED = 10_000
MOST_VERSIONS = 16
"""Values of the label `drafter_version` that a process shows: a fleet learns for months, and the series of a version
that no longer serves stand still."""
VERSION = "drafter_version"

_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class PrometheusMetrics:
    """Metrics to be scraped, in a registry of their own, with the memory and processor time of this process."""

    def __init__(self, table: Mapping[str, Metric] = TABLE, targets: Iterable[str] = ()) -> None:
        """
        Args:
            table: of the process's role; what all roles have is added.
            targets: counters of these begin at 0.
        """
        self._table = {**COMMON, **table}
        self._registry = CollectorRegistry()
        self._metrics = {name: self._register(name, metric) for name, metric in self._table.items()}
        self._lock = Lock()  # over _versions
        self._versions: dict[str, None] = {}  # oldest first
        self._found: dict[object, Any] = {}  # decoding asks for the same children in every pass
        ProcessCollector(registry=self._registry)
        self._begin_at_zero(tuple(targets))
        self.set("omnidraft_build_info", 1, version=__version__)

    @property
    def registry(self) -> CollectorRegistry:
        """For who exposes it."""
        return self._registry

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter."""
        if (counter := self._find(name, "counter", labels)) is not None and amount >= 0:
            counter.inc(amount)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """One more value of a distribution."""
        if (histogram := self._find(name, "histogram", labels)) is not None:
            histogram.observe(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Where a gauge stands."""
        if (gauge := self._find(name, "gauge", labels)) is not None:
            gauge.set(value)

    def render(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self._registry)

    def _register(self, name: str, metric: Metric) -> MetricWrapperBase:
        buckets = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
        return _KINDS[metric.kind](name, metric.help, metric.labels, registry=self._registry, **buckets)

    def _begin_at_zero(self, targets: tuple[str, ...]) -> None:
        """All counters whose labels can be foretold."""
        for name, metric in self._table.items():
            known = {"target": targets, **metric.values}
            if metric.kind == "counter" and metric.labels and all(label in known for label in metric.labels):
                for values in itertools.product(*(known[label] for label in metric.labels)):
                    self._metrics[name].labels(*values)

    def _find(self, name: str, kind: str, labels: Mapping[str, str]) -> Any:
        """The child to change; None, and a line in the log, when the table has no such thing."""
        asked = (name, kind, *labels.items())
        if (found := self._found.get(asked)) is None:
            found = self._found[asked] = self._child(name, kind, labels)
        return found

    def _child(self, name: str, kind: str, labels: Mapping[str, str]) -> Any:
        metric = self._table.get(name)
        if metric is None or metric.kind != kind or set(labels) != set(metric.labels):
            logger.warning("no %s %s with labels %s in the table of metrics", kind, name, sorted(labels))
            return None
        if VERSION in labels and labels[VERSION] not in self._versions:
            self._take_version(labels[VERSION])
        return self._metrics[name].labels(**labels) if labels else self._metrics[name]

    def _take_version(self, version: str) -> None:
        """One more; the series of the one seen first go when there are too many."""
        with self._lock:
            self._versions[version] = None
            if len(self._versions) <= MOST_VERSIONS:
                return
            oldest = next(iter(self._versions))
            del self._versions[oldest]
        for name, metric in self._table.items():
            if VERSION in metric.labels:
                self._metrics[name].remove_by_labels({VERSION: oldest})
        self._found.clear()


class CountingMetrics:
    """Metrics in memory, for tests and for processes that nobody scrapes. Takes any name."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self._observed: dict[tuple[str, frozenset[tuple[str, str]]], deque[float]] = {}

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter."""
        key = (name, frozenset(labels.items()))
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """One more value of a distribution."""
        with self._lock:
            values = self._observed.setdefault((name, frozenset(labels.items())), deque(maxlen=MOST_OBSERVED))
            values.append(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Where a gauge stands."""
        with self._lock:
            self._values[name, frozenset(labels.items())] = value

    def value(self, name: str, **labels: str) -> float:
        """Of a counter or gauge; without all labels, the sum over those left out. 0 when it never moved."""
        asked = set(labels.items())
        with self._lock:
            return sum(value for (known, its), value in self._values.items() if known == name and asked <= its)

    def observed(self, name: str, **labels: str) -> tuple[float, ...]:
        """The last MOST_OBSERVED values of a distribution, oldest first; without all labels, of each in turn."""
        asked = set(labels.items())
        with self._lock:
            found = [values for (known, its), values in self._observed.items() if known == name and asked <= its]
        return tuple(value for values in found for value in values)


class Labelled:
    """Other Metrics, with these labels added to every name."""

    def __init__(self, metrics: Metrics, **labels: str) -> None:
        self._metrics, self._labels = metrics, labels

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self._metrics.add(name, amount, **(self._labels | labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._metrics.observe(name, value, **(self._labels | labels))

    def set(self, name: str, value: float, **labels: str) -> None:
        self._metrics.set(name, value, **(self._labels | labels))
