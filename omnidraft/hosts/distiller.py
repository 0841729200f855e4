"""The distiller as a process: starts Ray, or joins a cluster, and keeps the distillation actor running."""

import logging
import os
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from omnidraft.config import Settings
from omnidraft.errors import OmnidraftError
from omnidraft.hosts.process import stop_on_signals
from omnidraft.hosts.ray_actor import OPTIONS, Distiller

NAMESPACE = "omnidraft"
POLL_S = 1.0

logger = logging.getLogger(__name__)


def main(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT, then publish what was learned; the exit code.

    A local Ray dies with this process, so a killed distiller leaves no actor that goes on publishing.

    Raises:
        OmnidraftError: log, registry or drafter cannot be used, or another distiller took over.
    """
    _start_ray()
    stop = stop_on_signals()
    try:
        made: Any = ray.remote(Distiller)
        actor = made.options(**OPTIONS).remote(settings.model_dump())
        running = actor.run.remote()
        while not ray.wait([running], timeout=POLL_S)[0]:
            if stop.is_set():
                logger.info("stopping: finishing the step, publishing what was learned")
                ray.get(actor.stop.remote())
                ray.get(running)
                return 0
        ray.get(running)
        return 0
    except RayTaskError as exc:
        if isinstance(exc.cause, OmnidraftError):
            raise exc.cause from exc
        raise
    except RayActorError as exc:
        logger.error("the distillation actor could not be started: %s", _reason(exc))
        return 1
    finally:
        ray.shutdown()


def _start_ray() -> None:
    """Join the cluster that RAY_ADDRESS names, else start Ray on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING)
    else:
        ray.init(include_dashboard=False, namespace=NAMESPACE, logging_level=logging.WARNING)


def _reason(exc: RayError) -> str:
    """The last line of what Ray says, which names the cause."""
    return str(exc).strip().splitlines()[-1]
