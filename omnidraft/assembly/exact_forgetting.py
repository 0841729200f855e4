"""Forget a tenant in the weights too: what that costs, and what is due once the distiller has done it."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from omnidraft.assembly.fleet import control_log, order_champion
from omnidraft.assembly.logs import log_reader
from omnidraft.assembly.registries import existing_registry
from omnidraft.assembly.signing import snapshot_signing
from omnidraft.assembly.tenants import TenantData, standing_order, when_done
from omnidraft.config import Settings
from omnidraft.distill.start import newest_without
from omnidraft.errors import RequestError
from omnidraft.fleet.forgetting_certificate import derivation, origin, write_certificate
from omnidraft.ports import Forget, Offsets, Registry, SnapshotVersion
from omnidraft.telemetry.metrics import CountingMetrics

ORDINARY = "without --exact it is forgotten but for the weights"


@dataclass(frozen=True, slots=True)
class Price:
    """What it costs one pair."""

    start: int
    """The version that learning goes back to."""
    num_messages: int
    """Messages that are read from there to the end of the log, the tenant's not among them."""
    minutes: float | None
    """By the fastest pace that this pair has learned at; None: it is not known."""


def prices(settings: Settings, tenant: str, data: TenantData) -> dict[str, Price]:
    """Return the price for every target that has snapshots; nothing where an order that stands covers all of it.

    Raises:
        RequestError: it cannot be done: the log has no message of the tenant, or for a target no snapshot from before
            the tenant is left after which the log has everything.
        BusError, RegistryError: log or registry cannot be read.
    """
    with closing(control_log(settings, CountingMetrics())) as control:
        state = control.read_whole()
    if standing_order(state, tenant, data, is_exact=True) is not None:
        return {}
    if not data.traces.positions or data.num_unopened:
        raise RequestError(f"the log does not show which messages are those of {tenant}; {ORDINARY}")
    with closing(log_reader(settings, settings.log.traces_topic)) as reader:
        log_id, firsts, ends = reader.identity(), reader.first_offsets(), reader.end_offsets()
    next_order = Forget(id="next", until_ms=0, first_offsets=data.traces.first_offsets)
    found = {}
    for target in settings.models.targets if settings.registry.exists else ():
        registry = existing_registry(settings.for_target(target))
        if not (versions := registry.versions()):
            continue
        if (start := newest_without(registry, state.forgets | {tenant: next_order}, log_id, firsts)) is None:
            raise RequestError(
                f"{target}: no snapshot from before {tenant} is left after which the log has every message "
                f"(registry.keep_resume, log.retention_hours), so the weights cannot forget it; {ORDINARY}"
            )
        num_messages = _num_messages(start.manifest.offsets, ends, data.traces.positions)
        found[target] = Price(start.version, num_messages, _minutes(num_messages, versions))
    return found


def _minutes(num_messages: int, versions: Sequence[SnapshotVersion]) -> float | None:
    learned = [(each.manifest.num_records, each.created_ms / 60_000) for each in versions]
    paces = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(learned) if b[1] > a[1]]
    fastest = max(paces, default=0.0)
    return num_messages / fastest if fastest > 0 else None


def _num_messages(begin: Offsets, end: Offsets, positions: list[tuple[int, int]]) -> int:
    """Return the number of messages between these offsets, less those at the tenant's positions."""
    num_messages = sum(max(0, offset - begin.get(partition, 0)) for partition, offset in end.items())
    return num_messages - sum(
        begin.get(partition, 0) <= offset < end.get(partition, 0) for partition, offset in positions
    )


def finish(
    settings: Settings,
    tenant: str,
    order: Forget,
    data: TenantData,
    folder: Path,
    timeout_s: float,
    advance: Callable[[int, int | None], None],
) -> dict[str, Path | None]:
    """Wait until the weights of every target have forgotten the tenant, let these serve instead of others that have
    not, and write the certificates into this folder.

    Args:
        advance: called with the messages that were learned again since, and with how many there are.

    Returns:
        Target -> its certificate; None: its distiller was not done in time. Targets without snapshots are missing.

    Raises:
        RequestError: a distiller could not go back, or an order to promote was refused.
        BusError, RegistryError: log or registry cannot be reached.
    """
    signing = snapshot_signing(settings)
    num_again: dict[str, tuple[int, int]] = {}

    def certify(pair: Settings, registry: Registry) -> Path | None:
        versions = registry.versions()
        num_before = sum(num for num, _ in num_again.values())
        num_again[pair.models.target] = _num_again(versions, order, data.traces.positions)
        nums, totals = zip(*num_again.values(), strict=True)
        advance(sum(nums) - num_before, sum(totals) or None)
        if (derived := derivation(versions, order)) is None:
            return None
        _let_serve(pair, versions, order, derived[1].version)
        return write_certificate(folder, tenant, order, derived, signing)

    targets = settings.models.targets if settings.registry.exists else ()
    learned = [each for each in targets if existing_registry(settings.for_target(each)).versions(1)]
    certificates = when_done(settings, learned, certify, timeout_s)
    return {target: certificates.get(target) for target in learned}


def _num_again(versions: Sequence[SnapshotVersion], order: Forget, positions: list[tuple[int, int]]) -> tuple[int, int]:
    """Return how many messages were learned again, and of how many; none before the first snapshot says it."""
    carried_out = [each for each in versions if order.id in each.manifest.forgets]
    if not carried_out or not (end := carried_out[0].manifest.catching_up_to):
        return 0, 0
    begin, at = origin(versions, order, carried_out[0]).manifest.offsets, carried_out[-1].manifest.offsets
    total = _num_messages(begin, end, positions)
    reached = {partition: min(offset, at.get(partition, 0)) for partition, offset in end.items()}
    return _num_messages(begin, reached, positions), total


def _let_serve(settings: Settings, versions: Sequence[SnapshotVersion], order: Forget, version: int) -> None:
    """Order that this version serves if the champion's weights have not forgotten the tenant."""
    with closing(control_log(settings, CountingMetrics())) as control:
        champion = control.read_whole().champion
        serving = next((each for each in versions if champion and each.version == champion.version), None)
        if serving is not None and order.concerns(serving.manifest):
            order_champion(settings, control, version)
