"""All checks, in the order in which one would fix what they find."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from omnidraft.config import Settings, load
from omnidraft.doctor import installation
from omnidraft.doctor.finding import Finding, Verdict, ok, problem, run_check, warning


def key_store(settings: Settings) -> Finding:
    """Check the key store of a log with encryption, without creating or changing anything."""
    from omnidraft.assembly.logs import tenant_keys

    keys = tenant_keys(settings)
    if keys is None:
        message = "there is none: all is encrypted with the master key, and no tenant can be forgotten at once"
        return warning("key store", message, "set log.key_store to a database that all services reach")
    num_open, num_closed, num_destroyed = keys.count()
    message = f"{num_open} keys of tenants, {num_destroyed} destroyed"
    if num_closed:
        advice = "add the master key that they were wrapped with to log.encryption_keys, behind the others"
        return problem("key store", f"{message}; {num_closed} that no master key opens", advice)
    return ok("key store", message)


Check = tuple[str, Callable[[], Finding]]


def examine(config_path: Path | None) -> Iterator[Finding]:
    """Yield the findings one by one. Without settings or libraries the other checks are skipped."""
    loaded: list[Settings] = []

    def settings_load() -> Finding:
        loaded.append(load(config_path))
        return ok("settings", str(config_path or "defaults and environment"))

    yield run_check("settings", settings_load)
    yield installation.python()
    yield installation.libraries(loaded[0] if loaded else None)
    if not loaded or installation.missing_libraries():
        return
    yield installation.bytecode()
    for name, check in _checks(loaded[0]):
        yield run_check(name, check)


def _checks(settings: Settings) -> Iterator[Check]:
    from omnidraft import assembly
    from omnidraft.doctor import machine

    assembly.set_threads(settings)  # before the first trial: outcomes are cached by number of threads
    yield "kernels", partial(machine.kernels, settings)
    yield "processor", machine.processor
    yield "precision", partial(machine.precision, settings)
    yield from _model_checks(settings)
    yield from _log_checks(settings)
    for target in settings.models.targets:
        yield from _pair_checks(settings.for_target(target))
    for what, folder, needed_bytes in machine.folders(settings):
        yield what, partial(machine.disk, what, folder, needed_bytes)
    yield "memory", partial(_memory, settings)
    yield "worker port", partial(machine.port, settings)


def _model_checks(settings: Settings) -> Iterator[Check]:
    from omnidraft.doctor import models

    section = settings.models
    for name in section.names:
        yield f"model {name}", partial(models.model, name)
    yield "packed models", models.packed
    if section.engine == "llamacpp":
        for name in section.targets:
            yield f"GGUF file of {name}", partial(models.gguf, name)


def _log_checks(settings: Settings) -> Iterator[Check]:
    """Yield the checks of the log. Those that need the broker run only when it answers, so one timeout is enough."""
    from omnidraft.doctor import log

    connection = run_check("log", partial(log.connection, settings))
    yield "log", lambda: connection
    if connection.verdict is not Verdict.OK:
        return
    section = settings.log
    if section.encryption_keys:
        yield "key store", partial(key_store, settings)
    for name in (section.traces_topic, section.dead_letters_topic, section.control_topic):
        yield f"topic {name}", partial(log.topic, settings, name)
    yield "clock", partial(log.clocks, settings)


def _pair_checks(settings: Settings) -> Iterator[Check]:
    from omnidraft.doctor import log, models, registry

    target = settings.models.target
    if settings.models.has_drafter:
        yield f"alignment of {target}", partial(models.alignment, settings)
    connection = run_check(f"registry of {target}", partial(registry.connection, settings))
    yield f"registry of {target}", lambda: connection
    if connection.verdict is not Verdict.OK:
        return
    yield f"aliases of {target}", partial(registry.aliases, settings)
    yield f"files of {target}", partial(registry.files, settings)
    if settings.models.has_drafter:
        yield f"champion's models of {target}", partial(models.champion_fits, settings)
    yield f"position of {target}", partial(log.position, settings)


def _memory(settings: Settings) -> Finding:
    """Check the free memory, unless a running worker has its models loaded already."""
    from omnidraft import assembly
    from omnidraft.doctor import machine
    from omnidraft.fleet.workers import worker_status

    if worker_status(assembly.worker_url(settings), metrics_key=settings.worker.metrics_key).served:
        return ok("memory", "a worker has its models loaded already")
    return machine.memory(settings)
