"""The distiller as a process: starts the Ray actor that learns, watches it, and stops it.

The actor is not detached: when this process ends, however it ends, Ray ends the actor, so none goes on publishing.
RAY_ADDRESS names a cluster; without it Ray runs inside this process's own family.
"""

import logging
import os
import tempfile
import threading
from typing import Any

from omnidraft.config import Settings
from omnidraft.hosts.process import stop_on_signals

NAMESPACE = "omnidraft"
WATCH_S = 1.0
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
            actor = _actor(settings, folder)
            learning = actor.run.remote()
            _watch(actor, learning, stop)
            ray.get(learning)
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
    ray.init(
        "local",
        num_cpus=_num_cpus(settings),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        **common,
    )


def _actor(settings: Settings, folder: str) -> Any:
    """A handle; the process behind it is replaced whenever it dies."""
    import ray

    from omnidraft.hosts.ray_actor import DistillerActor

    options: dict[str, Any] = {
        "name": f"distiller {settings.models.drafter} for {settings.models.target}",
        "num_cpus": _num_cpus(settings),  # Ray sets OMP_NUM_THREADS to it
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 2,
    }
    return ray.remote(**options)(DistillerActor).remote(settings.model_dump(mode="json"), folder)


def _num_cpus(settings: Settings) -> int:
    return settings.learner.threads or 1


def _watch(actor: Any, learning: Any, stop: threading.Event) -> None:
    """Until learning has ended; a line in the log for every snapshot, and for every new process behind the actor.

    `stop` is told again and again, because a process that replaces a killed one has not heard it.
    """
    import ray
    from ray.exceptions import RayError

    told: dict[str, Any] = {}
    asked = actor.status.remote()
    while not ray.wait([learning], timeout=WATCH_S)[0]:
        if stop.is_set():
            actor.stop.remote()
        if not ray.wait([asked], timeout=0)[0]:
            continue
        try:
            status = ray.get(asked)
        except RayError as exc:  # the process died under the question
            logger.warning("no status: %s", exc)
            status = None
        asked = actor.status.remote()
        told = _report(told, status) if status else told


def _report(told: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    if told.get("pid") != status["pid"]:
        logger.info("learning in process %d", status["pid"])
    if told.get("version") != status["version"]:
        logger.info(
            "snapshot %s: %d records, %d tokens, %d steps, losses %s, agreement %s",
            *(status[name] for name in ("version", "num_records", "num_tokens", "num_steps", "losses", "agreement")),
        )
    return status
