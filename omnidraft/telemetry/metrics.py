"""The two Metrics of ports.py: Prometheus for processes that are scraped, a counting one for all others.

TABLE names everything that is measured, with its help text and labels. Counts only: ratios are for dashboards.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server
from prometheus_client.metrics import MetricWrapperBase

from omnidraft.errors import ConfigError

logger = logging.getLogger(__name__)

MOST_OBSERVED = 10_000

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
TOKENS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
RATIOS = tuple(tenth / 20 for tenth in range(21))


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS


_DRAFTED = ("target", "drafter_version", "source")

TABLE: Mapping[str, Metric] = {
    "omnidraft_requests_total": Metric("counter", "Finished requests.", ("status", "target")),
    "omnidraft_requests_waiting": Metric("gauge", "Requests that wait for the target.", ("target",)),
    "omnidraft_emitted_tokens_total": Metric("counter", "Tokens shown to clients.", ("target", "drafter_version")),
    "omnidraft_target_passes_total": Metric("counter", "Passes of the target.", ("target", "drafter_version")),
    "omnidraft_time_to_first_token_seconds": Metric(
        "histogram", "From a request's arrival to its first token.", ("target",)
    ),
    "omnidraft_inter_token_latency_seconds": Metric("histogram", "Between two tokens of an answer."),
    "omnidraft_spec_decode_num_drafts_total": Metric("counter", "Trees scored.", _DRAFTED),
    "omnidraft_spec_decode_num_draft_tokens_total": Metric("counter", "Drafted nodes scored.", _DRAFTED),
    "omnidraft_spec_decode_num_accepted_tokens_total": Metric("counter", "Drafted nodes on the path.", _DRAFTED),
    "omnidraft_spec_decode_num_accepted_tokens_per_pos_total": Metric(
        "counter", "Nodes on the path, by depth.", (*_DRAFTED, "position")
    ),
    "omnidraft_spec_decode_accepted_tokens_per_pass": Metric(
        "histogram", "Nodes on the path of one pass.", ("target", "drafter_version"), TOKENS
    ),
    "omnidraft_followed_texts": Metric("gauge", "Texts that a proposer inside another engine remembers.", ("target",)),
    "omnidraft_drafter_ids": Metric("gauge", "Ids whose keys the drafter holds there.", ("target",)),
    "omnidraft_traces_emitted_total": Metric("counter", "Trace records handed to the recorder."),
    "omnidraft_traces_dropped_total": Metric("counter", "Trace records that never reached the log.", ("reason",)),
    "omnidraft_traces_acknowledged_total": Metric("counter", "Trace records the log has acknowledged."),
    "omnidraft_traces_read_total": Metric("counter", "Trace records read by the learner."),
    "omnidraft_traces_skipped_total": Metric("counter", "Trace records read and not learned from.", ("reason",)),
    "omnidraft_log_lag_records": Metric("gauge", "Records between the learner and the end of the log.", ("partition",)),
    "omnidraft_training_steps_total": Metric("counter", "Steps of the learner."),
    "omnidraft_training_tokens_total": Metric("counter", "Target tokens learned from."),
    "omnidraft_training_loss": Metric("gauge", "Mean loss of the last step.", ("loss",)),
    "omnidraft_training_step_seconds": Metric("histogram", "Duration of a step of the learner."),
    "omnidraft_held_out_agreement_ratio": Metric("gauge", "Agreement on held-out records.", ("drafter_version",)),
    "omnidraft_agreement_ratio": Metric("histogram", "Agreement of a request.", ("target",), RATIOS),
    "omnidraft_snapshot_version_info": Metric("gauge", "Snapshot in place.", ("target", "drafter")),
    "omnidraft_snapshots_published_total": Metric("counter", "Snapshots published."),
    "omnidraft_snapshot_swap_seconds": Metric("histogram", "How long a swap held up requests."),
    "omnidraft_snapshot_load_seconds": Metric("histogram", "Staging and loading a snapshot, beside the old one."),
    "omnidraft_snapshot_load_failures_total": Metric(
        "counter", "Snapshots that could not be put in place.", ("target",)
    ),
    "omnidraft_refresh_errors_total": Metric("counter", "Times log or registry did not answer a worker."),
    "omnidraft_controller_errors_total": Metric("counter", "Times log or registry did not answer the controller."),
    "omnidraft_refusals_total": Metric("counter", "Challengers that were not promoted."),
    "omnidraft_control_messages_skipped_total": Metric("counter", "Control messages that could not be read."),
    "omnidraft_promotions_total": Metric("counter", "Challengers that became champion."),
    "omnidraft_rollbacks_total": Metric("counter", "Champions that were taken back."),
    "omnidraft_drift_alarms_total": Metric("counter", "Falls of agreement that were no noise.", ("target",)),
}
"""Name -> what it is. A counter's name ends in _total."""

_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class PrometheusMetrics:
    """Metrics to be scraped, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics = {name: self._register(name, metric) for name, metric in TABLE.items()}

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

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes from a thread of its own, for hosts that have no HTTP side; returns the port, chosen if 0.

        Raises:
            ConfigError: the port is taken.
        """
        try:
            server, _ = start_http_server(port, host, registry=self._registry)
        except OSError as exc:
            raise ConfigError(f"metrics cannot be served on {host}:{port}: {exc.strerror}") from exc
        return int(server.server_port)

    def _register(self, name: str, metric: Metric) -> MetricWrapperBase:
        buckets = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
        return _KINDS[metric.kind](name, metric.help, metric.labels, registry=self._registry, **buckets)

    def _find(self, name: str, kind: str, labels: Mapping[str, str]) -> Any:
        """The child to change; None, and a line in the log, when the table has no such thing."""
        metric = TABLE.get(name)
        if metric is None or metric.kind != kind or set(labels) != set(metric.labels):
            logger.warning("no %s %s with labels %s in the table of metrics", kind, name, sorted(labels))
            return None
        return self._metrics[name].labels(**labels) if labels else self._metrics[name]


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
        """The last MOST_OBSERVED values of a distribution, oldest first."""
        with self._lock:
            return tuple(self._observed.get((name, frozenset(labels.items())), ()))
