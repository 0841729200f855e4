"""The distiller without Ray: one target's learner in this process, whose crash is its supervisor's to repair."""

import logging
from contextlib import closing

from prometheus_client import CollectorRegistry

from omnidraft.config import Settings
from omnidraft.errors import ConfigError
from omnidraft.hosts.process import stop_on_signals
from omnidraft.hosts.ray_actor import DistillerActor
from omnidraft.registry.staging import own_folder
from omnidraft.telemetry.exposition import Exposition, MergedCollector

logger = logging.getLogger(__name__)


def main(settings: Settings) -> int:
    """Learn until SIGTERM or SIGINT; the exit code.

    Raises:
        ConfigError: there are several targets.
        OmnidraftError: log, registry or drafter cannot be used, or another distiller took over.
    """
    if len(settings.models.targets) > 1:
        raise ConfigError('learner.host = "process" learns for one target; set it to "ray" for models.more_targets')
    logger.info('learning in this process (learner.host = "ray" learns in one that is started again when it crashes)')
    learner = DistillerActor(settings, str(own_folder()))
    stop_on_signals(learner.stopping)
    registry = CollectorRegistry()
    registry.register(MergedCollector("target", lambda: [(settings.models.target, learner.status()["metrics"])]))
    port, hosts = settings.metrics.distiller_port, settings.worker.allowed_hosts
    with closing(Exposition(registry, settings.metrics, port, hosts)):
        learner.run()
    logger.info("stopped")
    return 0
