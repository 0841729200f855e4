"""Forget a tenant everywhere, in an order of effects that may be cut off at any point and repeated.

First the tenant's keys are destroyed, and that of its group's memory. Then the content of its messages is deleted in an
SQLite log, encrypted or not. Then the order is written to the control log: distillers and workers carry it out. Then
the SQLite log is vacuumed, for which the disk may be too full. Last, files of old snapshots are deleted.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from omnidraft.assembly.fleet import control_log, ordering_log
from omnidraft.assembly.logs import key_store, log_reader, tenant_keys, topic_names
from omnidraft.assembly.registries import existing_registry
from omnidraft.bus import sqlite_forget
from omnidraft.config import Settings
from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.ingest.tenant_messages import TenantMatcher, TenantMessages, mark
from omnidraft.errors import ConfigError, RequestError
from omnidraft.fleet.forget_orders import AffectedSnapshots, affected_snapshots, order_forgetting, purge
from omnidraft.memory.memory_file import Owner, Owners
from omnidraft.ports import ControlState, Forget, LogReader, Message, Registry
from omnidraft.telemetry.metrics import CountingMetrics

if TYPE_CHECKING:
    from omnidraft.bus.tenant_keys import TenantKeys

WATCH_S = 0.5
_REPEATED_S = 3600.0
"""Seconds after an order in which none follows unless newer messages are found: the call was cut off, or waits again.
Later the tenant may have come back, and gone from the log, but not from snapshots and memories."""

OnMessage = Callable[[], None]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TenantData:
    """The data that is stored of a tenant."""

    num_keys: int
    """Keys that are not destroyed."""
    traces: TenantMessages
    dead_letters: TenantMessages
    had_keys: bool = False
    is_log_whole: bool = True
    """Whether the log has every message since it began."""

    @property
    def num_unprotected(self) -> int:
        """Messages that can be read without any key of the tenant's."""
        return self.traces.num_with_master_key + self.dead_letters.num_with_master_key

    @property
    def newest_ms(self) -> int:
        """The time of the newest message; see TenantMessages."""
        return max(self.traces.newest_ms, self.dead_letters.newest_ms)

    @property
    def num_unopened(self) -> int:
        """Encrypted messages that may be the tenant's, as no key here opens them."""
        return self.traces.num_unopened + self.dead_letters.num_unopened


@dataclass(frozen=True, slots=True)
class ForgetResult:
    """The result of forgetting a tenant."""

    order: Forget
    """The order on the control log."""
    num_keys: int
    """Keys that were destroyed, that of its group's memory too."""
    num_messages: int
    """Messages whose content was deleted from an SQLite log, now or by an earlier call."""


def tenant_data(settings: Settings, tenant: str, on_message: OnMessage = lambda: None) -> TenantData:
    """Look for a tenant's keys and messages, changing nothing. Raises BusError."""
    store = key_store(settings)
    stored = [] if store is None else store.all_keys()
    keys = [key for key in stored if key.tenant == tenant]
    others = [key.key_id for key in stored if key.tenant != tenant]
    matcher = TenantMatcher(tenant, [key.key_id for key in keys], other_key_ids=others)
    return TenantData(
        num_keys=sum(key.wrapped is not None for key in keys),
        traces=_find(settings, settings.log.traces_topic, matcher, on_message),
        dead_letters=_find(settings, settings.log.dead_letters_topic, matcher, on_message),
        had_keys=bool(keys),
        is_log_whole=_is_whole(settings, settings.log.traces_topic),
    )


def require_forgettable(settings: Settings, tenant: str, data: TenantData, *, accept_retention: bool) -> None:
    """Raise RequestError for the name of a group's keys; and unless `accept_retention`, for a tenant of whom nothing is
    known, and where only retention deletes some of its messages, or some that may be its own."""
    _require_no_group(settings, tenant)
    if not accept_retention:
        _require_known(settings, tenant, data)
        _require_deletable(tenant, data, is_rewritable=settings.log.path is not None)


def forget(
    settings: Settings,
    tenant: str,
    data: TenantData,
    *,
    is_exact: bool = False,
    accept_retention: bool = False,
    on_message: OnMessage = lambda: None,
) -> ForgetResult:
    """Forget a tenant, of which `data` was found; if `is_exact`, in the weights too.

    Raises:
        RequestError: see require_forgettable. Nothing is done.
        BusError: log or key store do not answer, or there is no space to vacuum the log; repeat it.
    """
    path = settings.log.path
    require_forgettable(settings, tenant, data, accept_retention=accept_retention)
    num_destroyed = _destroy_keys(settings, tenant)
    num_deleted = 0 if path is None else _delete_messages(settings, path, tenant, on_message)
    with closing(control_log(settings, CountingMetrics())) as control:
        order = standing_order(control.read_whole(), tenant, data, is_exact=is_exact) if not num_destroyed else None
        if order is None:
            first_offsets = data.traces.first_offsets if is_exact else {}
            order = order_forgetting(control, tenant, data.newest_ms, first_offsets)
    if path is not None:
        sqlite_forget.shrink(path, settings.log.traces_topic, settings.log.request_timeout_s)  # in none of its files
    return ForgetResult(order, num_destroyed, num_deleted)


def affected(settings: Settings, data: TenantData, forget_id: str) -> dict[str, AffectedSnapshots]:
    """Return the snapshots of every target, by what they may hold. Raises RegistryError."""
    if not settings.registry.exists:
        return {}
    return {
        target: affected_snapshots(
            existing_registry(settings.for_target(target)).versions(), data.traces.first_offsets, forget_id
        )
        for target in settings.models.targets
    }


def purge_snapshots(
    settings: Settings, data: TenantData, forget_id: str, timeout_s: float, on_target: Callable[[], None] = lambda: None
) -> dict[str, list[int]]:
    """Wait until every target's newest snapshot was made without the tenant, then delete the files of the others.

    Args:
        on_target: called when the snapshots of a target are purged.

    Returns:
        Target -> versions that lost their weights; targets whose distiller did not publish in time are missing.

    Raises:
        SnapshotError: the registry cannot be reached, or refuses.
    """
    if not settings.registry.exists:
        return {target: [] for target in settings.models.targets}

    def purge_if_clean(pair: Settings, registry: Registry) -> list[int] | None:
        versions = registry.versions()
        snapshots = affected_snapshots(versions, data.traces.first_offsets, forget_id)
        if not snapshots.is_newest_clean:
            return None
        purged = purge(registry, snapshots, versions[-1].version) if versions else []
        on_target()
        return purged

    return when_done(settings, settings.models.targets, purge_if_clean, timeout_s)


def when_done(
    settings: Settings,
    targets: Iterable[str],
    act: Callable[[Settings, Registry], Result | None],
    timeout_s: float,
) -> dict[str, Result]:
    """Call `act` for each pair again and again, until it returns something for all or the time is up; return what it
    did, by target. Raises RegistryError, and whatever `act` raises."""
    pairs = {target: settings.for_target(target) for target in targets}
    registries = {target: existing_registry(pair) for target, pair in pairs.items()}
    done, deadline = dict[str, Result](), time.monotonic() + timeout_s
    while True:
        for target in [each for each in pairs if each not in done]:
            if (result := act(pairs[target], registries[target])) is not None:
                done[target] = result
        if len(done) == len(pairs) or time.monotonic() >= deadline:
            return done
        time.sleep(WATCH_S)


def standing_order(state: ControlState, tenant: str, data: TenantData, *, is_exact: bool) -> Forget | None:
    """Return the last order if it covers all that was found, and if `is_exact` the weights too."""
    last = state.forget(tenant)
    if last is not None and is_exact:
        last = last.exact
    if last is None:
        return None
    is_recent = data.newest_ms > 0 or time.time() * 1000 - last.until_ms < 1000 * _REPEATED_S
    return last if data.newest_ms <= last.until_ms and is_recent else None


def existing_keys(settings: Settings) -> "TenantKeys":
    """Return the keys of all tenants. Raises ConfigError when there is no key store."""
    keys = tenant_keys(settings)
    if keys is None:
        raise ConfigError("there is no key store: set log.encryption_keys, and with Kafka log.key_store")
    return keys


def _require_no_group(settings: Settings, tenant: str) -> None:
    """Raise RequestError for the name of a group's keys, which would be destroyed for all of its tenants."""
    if any(tenant == Owner("group", group).key_name for group in settings.memory.groups.values()):
        raise RequestError(f"{tenant!r} names the keys of a group of memory.groups: forget one of its tenants instead")


def _require_known(settings: Settings, tenant: str, data: TenantData) -> None:
    """Raise RequestError where the log, which lacks nothing, has no message and no order of a tenant, nor a key."""
    messages = (*data.traces.positions, *data.dead_letters.positions)
    if messages or data.had_keys or data.num_unopened or not data.is_log_whole:
        return
    with closing(ordering_log(settings)) as control:
        if control.read_whole().forget(tenant) is None:
            raise RequestError(
                f"nothing of {tenant} is known here; is the name right? With --accept-retention workers are told to "
                "forget it all the same"
            )


def _require_deletable(tenant: str, data: TenantData, *, is_rewritable: bool) -> None:
    """Raise RequestError when there are messages that only retention deletes. A log that is `is_rewritable` loses those
    of the tenant that anybody can read."""
    advice = "with --accept-retention everything else is forgotten now"
    if data.num_unopened:
        raise RequestError(
            f"{data.num_unopened} messages are encrypted with keys that are not known here, so nobody can tell which "
            f"of them are {tenant}'s: set log.encryption_keys and log.key_store as the fleet has them; {advice}"
        )
    if data.num_unprotected and not is_rewritable:
        raise RequestError(
            f"{data.num_unprotected} messages of {tenant} in Kafka are not encrypted with a key of its own, so only "
            f"retention deletes them (log.retention_hours); {advice}"
        )


def _destroy_keys(settings: Settings, tenant: str) -> int:
    """Destroy the tenant's keys, and that of the memory that it shares with its group, which gets another one; return
    the number of keys that existed."""
    store, owner = key_store(settings), Owners(settings.memory.groups).of(tenant)
    names = {tenant, owner.key_name}
    return 0 if store is None else sum(store.destroy(name) for name in sorted(names))


def _find(settings: Settings, topic: str, matcher: TenantMatcher, on_message: OnMessage) -> TenantMessages:
    if topic not in topic_names(settings):
        return TenantMessages()
    with closing(log_reader(settings, topic)) as reader:
        idle_s = topic_scan.idle_timeout_s(settings.log.request_timeout_s)
        return matcher.find(_messages(reader, idle_s, on_message))


def _is_whole(settings: Settings, topic: str) -> bool:
    if topic not in topic_names(settings):
        return True
    with closing(log_reader(settings, topic)) as reader:
        return not any(reader.first_offsets().values())


def _messages(reader: LogReader, idle_s: float, on_message: OnMessage) -> Iterator[Message]:
    for message in topic_scan.messages(reader, idle_s=idle_s):
        on_message()
        yield message


def _delete_messages(settings: Settings, path: Path, tenant: str, on_message: OnMessage) -> int:
    """Delete what lies in an SQLite log by now; return the number of messages."""
    data, timeout_s, log = tenant_data(settings, tenant, on_message), settings.log.request_timeout_s, settings.log
    for topic, found in [(log.traces_topic, data.traces), (log.dead_letters_topic, data.dead_letters)]:
        sqlite_forget.forget_messages(path, topic, found.positions, mark(tenant), timeout_s)
    return len(data.traces.positions) + len(data.dead_letters.positions)
