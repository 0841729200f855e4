"""The settings, the models and the learning services of one run of the demo."""

import json
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from omnidraft import assembly, config, extras
from omnidraft.demo.answers import recorded
from omnidraft.demo.local_cluster import LocalCluster
from omnidraft.demo.screen import downloads, spinner
from omnidraft.errors import cannot_write
from omnidraft.ports import Registry

START_TIMEOUT_S = 600.0
CONFIG_FILE = "config.toml"


@contextmanager
def running_services(out: Path, settings: config.Settings) -> Iterator[tuple[LocalCluster, Registry]]:
    """Yield the cluster and registry of a run, with its controller and distiller started and both models fetched.

    Raises:
        ServiceFailed: a service ended, or took too long.
    """
    with local_cluster(out) as cluster:
        with _pulled(settings):
            for name in ("controller", "distiller"):  # they wait for the models
                cluster.start(name, service_command(name, out))
        registry = assembly.registry(settings)
        with spinner("starting controller and distiller"):
            cluster.wait_for(lambda: bool(registry.versions()), "first version", START_TIMEOUT_S)
        yield cluster, registry


def local_cluster(out: Path) -> LocalCluster:
    """Return the cluster of a run: a user's environment may name a registry and a log that are in use elsewhere."""
    return LocalCluster(out / "logs", config.without_settings(os.environ))


def service_command(name: str, out: Path) -> list[str]:
    """Return the command of a service with the settings of a run."""
    return [sys.executable, "-m", "omnidraft.cli", "run", name, "--config", str(out / CONFIG_FILE)]


@contextmanager
def _pulled(settings: config.Settings) -> Iterator[None]:
    """Download both models during the `with` block, unless they are on this machine, with a progress bar."""
    from omnidraft.models.catalog import store

    names = settings.models.target, settings.models.drafter
    title = "looking for both models, which are fetched the first time (1.2 GB)"
    with downloads(title) as progress, ThreadPoolExecutor(len(names)) as pool:
        pulls = pool.map(partial(store.resolve, progress=progress), names)
        yield
        list(pulls)  # raises what went wrong


def run_settings(out: Path, log: str | None, **sections: Mapping[str, object]) -> config.Settings:
    """Write the settings of a run into its folder, with the models whose answers are recorded and a fresh log and
    registry, and return them.

    Raises:
        RequestError: `out` cannot be written.
    """
    (first, *_), _ = recorded(0)
    own = {
        "models": {"target": first.target, "drafter": first.drafter},
        "log": {"url": log or f"sqlite:///{out}/log.db", "topic_prefix": f"demo-{uuid.uuid4().hex[:8]}"},
        "registry": {"url": _registry_url(out)},
    }
    lines = []
    for name, section in {**own, **sections}.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    path = out / CONFIG_FILE
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    except OSError as exc:
        raise cannot_write(path, exc, "another --out") from exc
    return config.load(path, {})


def _registry_url(out: Path) -> str:
    if extras.is_installed("mlflow"):
        return f"sqlite:///{out}/mlflow.db"
    return f"directory:///{out.absolute()}/registry"
