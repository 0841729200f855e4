"""The distiller as a process: starts one Ray actor per target, which learns, and supervises and stops them. With
`learner.host = "process"` it learns for one target itself (local_distiller.py).

The actors are not detached: when this process ends, however it ends, Ray ends them, so none goes on publishing.
RAY_ADDRESS names a cluster, which places each actor on a node with its resources; an actor that cannot be placed stays
pending, and the log says so. Without RAY_ADDRESS a local Ray runs as this process's children, reachable on the loopback
interface alone.
"""

import logging
import math
import os
import secrets
import stat
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry

from omnidraft import extras
from omnidraft.config import Settings
from omnidraft.errors import ConfigError, OmnidraftError
from omnidraft.hosts import local_distiller
from omnidraft.hosts.process import stop_on_signals
from omnidraft.registry.staging import own_folder, remove_abandoned
from omnidraft.telemetry.exposition import Exposition, MergedCollector
from omnidraft.throttle import NICENESS

WATCH_S = 1.0
PLACED_S = 30.0
"""The time after which an actor that never answered is logged as pending."""
LOST_S = 120.0
"""The same for one that has answered. It answers in a thread of its own, so no step delays that for long."""
STOP_S = 120.0
"""How long the other learners have to stop where one has failed: for a step and a snapshot."""
LAST_STATUS_S = 2.0
"""How long an actor that has ended has for each answer."""
OBJECT_STORE_BYTES = 80_000_000  # Ray's minimum; nothing large goes through it

logger = logging.getLogger(__name__)


def main(settings: Settings) -> int:
    """Learn until SIGTERM or SIGINT; the exit code.

    Raises:
        OmnidraftError: log, registry or drafter cannot be used, or another distiller took over.
    """
    if not extras.distiller_needs_ray(settings):
        return local_distiller.main(settings)
    extras.require("ray", "learning for several targets, on a cluster, or with learner.host = ray")
    _start_ray(settings)
    import ray

    stop = stop_on_signals()
    try:
        journal_folder = own_folder()
        pairs = [settings.for_target(target) for target in settings.models.targets]
        learners = [_LearnerActor(pair, journal_folder) for pair in pairs]
        with closing(_exposition(learners, settings)):
            _watch(learners, stop)
    finally:
        ray.shutdown()
        remove_abandoned()  # those of actors that Ray has just killed
    logger.info("stopped")
    return 0


def _start_ray(settings: Settings) -> None:
    """Join the cluster of RAY_ADDRESS, or start a local Ray. Raises ConfigError: that cluster cannot be joined, or the
    local Ray does not come up."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    niceness = max(0, NICENESS - os.getpriority(os.PRIO_PROCESS, 0))  # to which Ray adds it
    os.environ.setdefault("RAY_worker_niceness", str(niceness))
    if "RAY_ADDRESS" not in os.environ:  # before Ray is imported
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # no cluster, so it listens on the loopback interface
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # else Ray puts one into a file that others may read
    import ray
    from ray.exceptions import RayError

    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if "RAY_ADDRESS" in os.environ:
        _require_private_token()
        try:
            ray.init(**common)
        except (OSError, RuntimeError, ValueError, RayError) as exc:
            address = os.environ["RAY_ADDRESS"]
            raise ConfigError(f"RAY_ADDRESS={address} names no Ray cluster that can be joined: {exc}") from exc
        return
    num_actors = len(settings.models.targets)
    folder = own_folder(Path(os.environ.get("RAY_TMPDIR", "/tmp")))  # whose sockets' paths have 107 bytes at most
    others, started_s = _children(), time.monotonic()
    try:
        ray.init(
            "local",
            num_cpus=_num_cpus(settings) * num_actors,
            resources={name: amount * num_actors for name, amount in settings.learner.ray_resources.items()},
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(folder / "ray"),  # Ray lets everybody write into it, but nobody else gets there
            **common,
        )
    except Exception as exc:  # Ray raises bare ones too
        ray.shutdown()
        _kill(_children() - others)
        advice = 'start again, or learn without it (`learner.host = "process"`)'
        why = " ".join(str(exc).split())
        took_s = time.monotonic() - started_s
        raise ConfigError(f"Ray did not start within {took_s:.0f} s: {advice}. Ray says: {why}") from exc


def _require_private_token() -> None:
    """Raise ConfigError where others may read the file from which Ray takes the cluster's token: whoever has it runs
    code as this user."""
    if "RAY_AUTH_TOKEN" in os.environ:
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    if path.exists() and path.stat().st_mode & stat.S_IROTH:
        raise ConfigError(f"others may read Ray's token, and with it run code as this user: chmod 600 {path}")


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _kill(processes: Collection[psutil.Process]) -> None:
    """Kill what a start that failed left running."""
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(processes)


def _actor(settings: Settings, journal_folder: Path) -> Any:
    """Return the handle of a new actor; Ray replaces its process whenever that dies."""
    import ray

    from omnidraft.hosts.ray_actor import DistillerActor

    options: dict[str, Any] = {
        **_needs(settings),  # Ray sets OMP_NUM_THREADS to num_cpus
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 2,
    }
    return ray.remote(**options)(DistillerActor).remote(settings, str(journal_folder))


def _needs(settings: Settings) -> dict[str, Any]:
    """Return the resources that Ray reserves on a node for one learner."""
    learner = settings.learner
    return {
        "num_cpus": _num_cpus(settings),
        "resources": dict(learner.ray_resources),
    }


def _num_cpus(settings: Settings) -> int:
    return settings.learner.threads or 1


def _exposition(learners: Sequence["_LearnerActor"], settings: Settings) -> Exposition:
    """Serve the metrics of all actors at one port of this process, wherever they run."""
    registry = CollectorRegistry()
    registry.register(MergedCollector("target", lambda: [(each.target, each.metrics) for each in learners]))
    return Exposition(registry, settings.metrics, settings.metrics.distiller_port, settings.worker.allowed_hosts)


class _LearnerActor:
    """One target's actor, and its last logged status."""

    def __init__(self, settings: Settings, journal_folder: Path) -> None:
        self.target = settings.models.target
        self.metrics = ""
        """Its process's metrics of a second ago; empty while it has no place."""
        self._actor = _actor(settings, journal_folder)
        self.ended = self._actor.run.remote()
        """The object ref that resolves when `run` returns."""
        self._status_ref = self._actor.status.remote()
        self._last_status: dict[str, Any] = {}
        self.is_placed = False
        """Whether it answers, so a node has taken it."""
        self._warn_pending_at: float | None = time.monotonic() + PLACED_S
        """None after the warning."""
        self._needs = _needs(settings)

    def stop(self) -> None:
        """Stop learning. Repeat the call until the actor ends: a process that replaces a killed one has missed it."""
        self._actor.stop.remote()

    def log_status(self) -> None:
        """Log every new snapshot, every new process and every warning of the actor, without waiting."""
        import ray
        from ray.exceptions import RayError

        if not ray.wait([self._status_ref], timeout=0)[0]:
            self._warn_pending()
            return
        self.is_placed, self._warn_pending_at = True, time.monotonic() + LOST_S
        try:
            self._log_changes(ray.get(self._status_ref))
        except RayError as exc:  # the process died during the call
            logger.warning("%s: no status: %s", self.target, exc)
        self._status_ref = self._actor.status.remote()

    def failure(self) -> Exception | None:
        """Return why `run` has ended; None: it was stopped."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            ray.get(self.ended)
        except RayTaskError as exc:  # the actor's traceback stays out of a refusal, which is one line
            return exc.cause if isinstance(exc.cause, OmnidraftError) else exc
        except RayError as exc:
            return exc
        return None

    def log_last_status(self) -> None:
        """Log what an actor that has ended did and warned of since `log_status`, as far as it still answers."""
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):  # its end says more
            self._log_changes(ray.get(self._status_ref, timeout=LAST_STATUS_S))
            self._log_changes(ray.get(self._actor.status.remote(), timeout=LAST_STATUS_S))

    def _warn_pending(self) -> None:
        """Warn once that the actor has no place, or lost it with its node."""
        if self._warn_pending_at is None or time.monotonic() < self._warn_pending_at:
            return
        logger.warning("%s: waits for a Ray node that has %s free", self.target, self._needs)
        self.is_placed, self.metrics, self._warn_pending_at = False, "", None
        self._last_status = {}

    def _warn_replaced(self) -> None:
        """Warn that the process is another one, if there was one, and say what memory that had: Ray does not tell the
        log why it ended a process, and a machine that is short of memory is the usual reason."""
        if last := self._last_status:
            held, available = (last.get(name, math.nan) / 2**30 for name in ("memory_bytes", "available_bytes"))
            logger.warning(
                "%s: process %d has ended, and the next one goes on from the newest snapshot; it held %.1f GiB, and "
                "%.1f GiB were available there; Ray ends learners where memory is short",
                self.target,
                last["pid"],
                held,
                available,
            )

    def _log_changes(self, status: dict[str, Any]) -> None:
        self.metrics = status["metrics"]
        if self._last_status.get("pid") != status["pid"]:
            self._warn_replaced()
            logger.info("%s: learning in process %d", self.target, status["pid"])
        for level, warning in status["warnings"]:
            logger.log(level, "%s: %s", self.target, warning)
        if status["version"] not in (None, self._last_status.get("version")):
            names = ("version", "agreement", "num_records", "num_tokens", "num_steps", "losses")
            logger.info(
                "%s: snapshot %s, agreement %s; by now %d records, %d tokens, %d steps, losses %s",
                self.target,
                *(status[name] for name in names),
            )
        self._last_status = status


def _watch(learners: Sequence[_LearnerActor], stop: threading.Event) -> None:
    """Supervise the actors until all have ended. Raises the error of the first that fails, once the others have
    stopped or STOP_S have passed: one killed in a step would accuse that step's records."""
    import ray

    running = {each.ended: each for each in learners}
    error: Exception | None = None
    end_at = math.inf
    while running and time.monotonic() < end_at:
        for ended in ray.wait(list(running), num_returns=len(running), timeout=WATCH_S)[0]:
            learner = running.pop(ended)
            learner.log_last_status()
            failure = learner.failure()
            if failure is not None and len(learners) > 1:
                logger.error("%s: all learners stop: %s", learner.target, failure)
            if failure is not None and error is None:
                error, end_at = failure, time.monotonic() + STOP_S
                stop.set()
        for each in tuple(running.values()):
            each.log_status()
            if stop.is_set() and each.is_placed:
                each.stop()
            elif stop.is_set():
                del running[each.ended]  # it has no place; Ray drops it with this process
    if error is not None:
        raise error from None
