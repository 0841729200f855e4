"""What the page of a worker may do about the fleet, for the operator: read its status and give orders."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any

from omnidraft import wiring
from omnidraft.config import Settings, masked
from omnidraft.errors import ConfigError, RequestError, SnapshotCorrupt, SnapshotNotFound
from omnidraft.fleet import orders
from omnidraft.fleet.control_log import publish_announcement
from omnidraft.serving.page.fleet_stream import FleetOrder
from omnidraft.wiring.signing import require_signer


class SettingsFleet:
    """Implements serving.page.fleet_stream.Fleet over the log and the registry of the settings, as the command line
    does."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def read(self) -> Mapping[str, Any]:
        """See Fleet. The address of the registry is told if it is a server's."""
        url = self._settings.registry.url
        registry = masked(url) if url.startswith(("http://", "https://")) else None
        return asdict(wiring.overview(self._settings)) | {"registry": registry}

    def obey(self, order: FleetOrder) -> None:
        """See Fleet."""
        targets = self._settings.models.targets
        if order.target not in targets:
            raise RequestError(f"target: {order.target!r} is none of {', '.join(map(repr, targets))}")
        try:
            _carry_out(order, self._settings.for_target(order.target))
        except (ConfigError, SnapshotNotFound, SnapshotCorrupt) as exc:
            raise RequestError(str(exc)) from exc


def _carry_out(order: FleetOrder, settings: Settings) -> None:
    require_signer(settings, ("controller", "operator"))
    match order.kind:
        case "pause" | "resume":
            with closing(wiring.control_writer(settings)) as control:
                publish_announcement(control, order.kind, target=order.target)
        case "promote" | "rollback":
            name = "previous" if order.version is None else str(order.version)
            registry, drafter = wiring.existing_registry(settings), settings.models.followed_drafter
            open_control = partial(wiring.control_writer, settings)
            orders.promote(registry, open_control, name, target=order.target, drafter=drafter)
