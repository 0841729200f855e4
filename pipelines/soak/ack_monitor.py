"""Which answered requests' records the log has acknowledged, by the worker's own counters, whatever kills it.

The worker hands a record over before the answer's last token goes out. So when a look at its counters finds as many
acknowledged as emitted, every request that was answered before that look has its record acknowledged. Counters die
with the process: what was answered by an earlier life of the worker and not known to be acknowledged stays unknown.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

LOOK_EVERY_S = 0.2
WORKER = "decode_worker"
NAMES = ("emitted", "acknowledged", "dropped")


def counters(metrics: str) -> dict[str, float]:
    """Of trace records, by what became of them."""
    found = dict.fromkeys(NAMES, 0.0)
    for line in metrics.splitlines():
        for name in NAMES:
            if line.startswith(f"omnidraft_traces_{name}_total"):
                found[name] += float(line.rpartition(" ")[2])
    return found


class AckMonitor:
    """Looks at one worker from a thread of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.life = 0
        """Changes before and after the worker dies, so that an answer which comes in between belongs to no life."""
        self.acknowledged: set[str] = set()
        """Request ids."""
        self.num_acknowledged = 0
        """Sum of the counter over all lives, each as last seen."""
        self.num_dropped = 0
        self._waiting: set[str] = set()
        self._seen = dict.fromkeys(NAMES, 0.0)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Take a last look."""
        self._stop.set()
        self._thread.join()
        self.look()
        self._end_life()

    def answered(self, request_id: str, life: int) -> None:
        """A client has this answer, and asked in this life."""
        with self._lock:
            if life == self.life:
                self._waiting.add(request_id)

    @contextmanager
    def worker_dies(self) -> Iterator[None]:
        """Around its end."""
        self._end_life()
        yield
        self._end_life()

    def ended(self, name: str) -> None:
        """A process ended by itself; what is started in its place has a life of its own."""
        if name == WORKER:
            self._end_life()

    def look(self) -> dict[str, float] | None:
        """The counters now; None when the worker does not answer, or died meanwhile."""
        with self._lock:
            life, waiting = self.life, set(self._waiting)
        try:
            found = counters(httpx.get(f"{self._url}/metrics", timeout=2.0).text)
        except httpx.HTTPError:
            return None
        with self._lock:
            if life != self.life:
                return None
            self._seen = found
            if found["acknowledged"] == found["emitted"]:
                self.acknowledged |= waiting
                self._waiting -= waiting
        return found

    def _end_life(self) -> None:
        with self._lock:
            self.life += 1
            self._waiting.clear()
            self.num_acknowledged += int(self._seen["acknowledged"])
            self.num_dropped += int(self._seen["dropped"])
            self._seen = dict.fromkeys(NAMES, 0.0)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self.look()
