"""The fleet's application for Ray Serve: `serve run deploy/ray/serve.yaml`.

One deployment per target, so that each scales by its own queue, and `Ingress` in front. The YAML file sets the
resources of a deployment (replicas, processors, memory) under its name; the settings configure omnidraft. Changing
either and running `serve deploy` again replaces the replicas one after the other.
"""

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application

from omnidraft import config
from omnidraft.decode.recording.trace_producer import DRAIN_S
from omnidraft.hosts.ray_ingress import Ingress
from omnidraft.hosts.ray_router import ConversationRouter
from omnidraft.hosts.ray_worker import DecodeReplica

MAX_ONGOING = 8
"""Requests that one replica holds and decodes together. More wait in the ingress."""
MAX_QUEUED = 256
"""Requests of one target that wait in one ingress; more get 429."""
INGRESS_ONGOING = 1000
"""Requests that one ingress holds, waiting and in progress."""


class FleetArgs(BaseModel):
    """`args` of the application in the YAML file."""

    model_config = ConfigDict(extra="forbid")

    config: Path | None = None
    """A settings file, readable where Serve builds the application."""
    settings: dict[str, dict[str, Any]] = {}
    """Section -> field -> value; they win over file and environment."""


def build(args: FleetArgs) -> Application:
    """Build the application. Raises ConfigError for wrong settings."""
    settings = config.load(args.config, **args.settings)
    replicas = {target: _deployment(settings.for_target(target)) for target in settings.models.targets}
    ingress: Application = _ingress_deployment().bind(settings.worker, replicas)
    return ingress


def deployment_name(target: str) -> str:
    """Return the deployment name of a target, which the YAML file uses: its catalog name or the last part of a path."""
    return "decode-" + re.sub(r"[^A-Za-z0-9._-]", "-", Path(target).name)


def _ingress_deployment() -> serve.Deployment:
    return serve.deployment(name="ingress", max_ongoing_requests=INGRESS_ONGOING)(Ingress)


def _deployment(settings: config.Settings) -> Application:
    """Return the deployment of one target."""
    deployed = serve.deployment(
        name=deployment_name(settings.models.target),
        max_ongoing_requests=MAX_ONGOING,
        max_queued_requests=MAX_QUEUED,
        autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 2},
        graceful_shutdown_timeout_s=settings.worker.drain_timeout_s + 2 * DRAIN_S,
        request_router_config={"request_router_class": ConversationRouter},
        health_check_period_s=5,
        health_check_timeout_s=30,
    )(DecodeReplica)
    replicas: Application = deployed.bind(settings)
    return replicas
