"""The answered requests whose records the log has acknowledged, by the worker's own counters, through its deaths.

The worker hands a record over before the answer's last token goes out. So when a poll of its counters shows as many
acknowledged as emitted, every request that was answered before that poll has its record acknowledged. Counters die
with the process: a request that was answered by an earlier life of the worker, and was not known to be acknowledged by
then, stays unknown.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

POLL_EVERY_S = 0.2
NAMES = ("emitted", "acknowledged", "dropped")


def counters(metrics: str) -> dict[str, float]:
    """Return the worker's counts of trace records by name of the counter."""
    counts = dict.fromkeys(NAMES, 0.0)
    for line in metrics.splitlines():
        for name in NAMES:
            if line.startswith(f"omnidraft_traces_{name}_total"):
                counts[name] += float(line.rpartition(" ")[2])
    return counts


class AckMonitor:
    """Polls one worker in a thread of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.life = 0
        """Changes before and after the worker dies, so that an answer in between belongs to no life."""
        self.acknowledged: set[str] = set()
        """Request ids."""
        self.num_acknowledged = 0
        """Sum of the counter's last known values over all lives."""
        self.num_dropped = 0
        self._waiting: set[str] = set()
        self._last_counts = dict.fromkeys(NAMES, 0.0)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ack-monitor", daemon=True)

    def start(self) -> None:
        """Start to poll."""
        self._thread.start()

    def stop(self) -> None:
        """Poll a last time and stop."""
        self._stop.set()
        self._thread.join()
        self.poll()
        self.end_life()

    def answered(self, request_id: str, life: int) -> None:
        """Note that a client has the answer to a request that it sent in this life."""
        with self._lock:
            if life == self.life:
                self._waiting.add(request_id)

    @contextmanager
    def worker_dies(self) -> Iterator[None]:
        """Mark the worker's end: requests that are answered within the context belong to no life."""
        self.end_life()
        yield
        self.end_life()

    def poll(self) -> dict[str, float] | None:
        """Return the counters now; None when the worker does not answer, or died meanwhile."""
        with self._lock:
            life, waiting = self.life, set(self._waiting)
        try:
            # without what only HTTPS needs: see is_serving
            counts = counters(httpx.get(f"{self._url}/metrics", timeout=2.0, verify=False).text)
        except httpx.HTTPError:
            return None
        with self._lock:
            if life != self.life:
                return None
            self._last_counts = counts
            if counts["acknowledged"] == counts["emitted"]:
                self.acknowledged |= waiting
                self._waiting -= waiting
        return counts

    def end_life(self) -> None:
        """Note that the worker ended; its successor begins a new life."""
        with self._lock:
            self.life += 1
            self._waiting.clear()
            self.num_acknowledged += int(self._last_counts["acknowledged"])
            self.num_dropped += int(self._last_counts["dropped"])
            self._last_counts = dict.fromkeys(NAMES, 0.0)

    def _run(self) -> None:
        while not self._stop.wait(POLL_EVERY_S):
            self.poll()
