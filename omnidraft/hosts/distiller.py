"""The distiller as a process: starts a Ray actor that learns for each target, watches them, and stops them.

The actors are not detached: when this process ends, however it ends, Ray ends them, so none goes on publishing.
RAY_ADDRESS names a cluster, which puts each actor where its resources are; one for which there is no place waits, and
the log says so. Without RAY_ADDRESS Ray runs inside this process's own family.
"""

import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from omnidraft.config import Settings
from omnidraft.hosts.process import stop_on_signals
from omnidraft.telemetry.exposition import Exposition, MergedCollector

NAMESPACE = "omnidraft"
WATCH_S = 1.0
PLACED_S = 30.0
"""After which an actor that has not answered yet is said to wait for a place."""
OBJECT_STORE_BYTES = 80_000_000  # Ray's least; nothing large goes through it

logger = logging.getLogger(__name__)


def main(settings: Settings) -> int:
    """Learn until SIGTERM or SIGINT; the exit code.

    Raises:
        OmnidraftError: log, registry or drafter cannot be used, or another distiller took over.
    """
    import ray

    _start_ray(settings)
    stop = stop_on_signals()
    with tempfile.TemporaryDirectory(prefix="omnidraft-distiller-") as folder:
        try:
            pairs = [settings.for_target(target) for target in settings.models.targets]
            at_work = [_Learning(pair, Path(folder, str(number))) for number, pair in enumerate(pairs)]
            with closing(_exposed(at_work, settings)):
                _watch(at_work, stop)
        finally:
            ray.shutdown()
    logger.info("stopped")
    return 0


def _start_ray(settings: Settings) -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", str(settings.learner.nice))
    common: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.WARNING}
    if "RAY_ADDRESS" in os.environ:
        ray.init(**common)
        return
    num_actors = len(settings.models.targets)
    ray.init(
        "local",
        num_cpus=_num_cpus(settings) * num_actors,
        resources={name: amount * num_actors for name, amount in settings.learner.ray_resources.items()},
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **common,
    )


def _actor(settings: Settings, folder: Path) -> Any:
    """A handle; the process behind it is replaced whenever it dies."""
    import ray

    from omnidraft.hosts.ray_actor import DistillerActor

    options: dict[str, Any] = {
        "name": f"distiller {settings.models.drafter} for {settings.models.target}",
        **_needs(settings),  # Ray sets OMP_NUM_THREADS to num_cpus
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 2,
    }
    return ray.remote(**options)(DistillerActor).remote(settings, str(folder))


def _needs(settings: Settings) -> dict[str, Any]:
    """What a node must have free for one learner, in Ray's words."""
    learner = settings.learner
    return {
        "num_cpus": _num_cpus(settings),
        "resources": dict(learner.ray_resources),
    }


def _num_cpus(settings: Settings) -> int:
    return settings.learner.threads or 1


def _exposed(at_work: Sequence["_Learning"], settings: Settings) -> Exposition:
    """The metrics of all actors at one port of this process, wherever they run and however often they are replaced."""
    registry = CollectorRegistry()
    registry.register(MergedCollector("target", lambda: [(each.target, each.metrics) for each in at_work]))
    return Exposition(registry, settings.metrics, settings.metrics.distiller_port)


class _Learning:
    """One target's actor at work, and what was told of it in the log."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        folder.mkdir()
        self.target = settings.models.target
        self.metrics = ""
        """Of its process, as it was a second ago."""
        self._actor = _actor(settings, folder)
        self.ended = self._actor.run.remote()
        """Ray's promise of the end."""
        self._asked = self._actor.status.remote()
        self._told: dict[str, Any] = {}
        self.has_place = False
        """Whether a node has taken it, as far as it has answered."""
        self._tell_waiting_at: float | None = time.monotonic() + PLACED_S
        """None: it was told."""
        self._needs = _needs(settings)

    def stop(self) -> None:
        """Told again and again, because a process that replaces a killed one has not heard it."""
        self._actor.stop.remote()

    def look(self) -> None:
        """A line in the log for every snapshot, and for every new process behind the actor."""
        import ray
        from ray.exceptions import RayError

        if not ray.wait([self._asked], timeout=0)[0]:
            self._tell_waiting()
            return
        self.has_place = True
        try:
            status = ray.get(self._asked)
        except RayError as exc:  # the process died under the question
            logger.warning("%s: no status: %s", self.target, exc)
            status = None
        self._asked = self._actor.status.remote()
        if status:
            self.metrics = status["metrics"]
            self._tell(status)

    def _tell_waiting(self) -> None:
        if self.has_place or self._tell_waiting_at is None or time.monotonic() < self._tell_waiting_at:
            return
        logger.warning("%s: waits for a Ray node that has %s free", self.target, self._needs)
        self._tell_waiting_at = None

    def _tell(self, status: dict[str, Any]) -> None:
        if self._told.get("pid") != status["pid"]:
            logger.info("%s: learning in process %d", self.target, status["pid"])
        if status["waits_for"] and self._told.get("waits_for") != status["waits_for"]:
            logger.error("%s: learning stands still: %s", self.target, status["waits_for"])
        num_expired = status["skipped"].get("expired", 0)
        if num_expired > self._told.get("skipped", {}).get("expired", 0):
            logger.warning("%s: %d messages so far expired before they were learned", self.target, num_expired)
        if self._told.get("version") != status["version"]:
            names = ("version", "num_records", "num_tokens", "num_steps", "losses", "agreement")
            logger.info(
                "%s: snapshot %s: %d records, %d tokens, %d steps, losses %s, agreement %s",
                self.target,
                *(status[name] for name in names),
            )
        self._told = status


def _watch(at_work: Sequence[_Learning], stop: threading.Event) -> None:
    """Until all have ended. Raises what ended one of them; the others then end with this process."""
    import ray

    learning = {each.ended: each for each in at_work}
    while learning:
        for ended in ray.wait(list(learning), num_returns=len(learning), timeout=WATCH_S)[0]:
            del learning[ended]
            ray.get(ended)
        for each in tuple(learning.values()):
            each.look()
            if stop.is_set() and each.has_place:
                each.stop()
            elif stop.is_set():
                del learning[each.ended]  # it has not begun; Ray drops it with this process
