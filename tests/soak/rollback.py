"""The time of a rollback until every worker serves the snapshot before: several workers, repeated."""

import time
from collections.abc import Sequence
from statistics import median

from omnidraft import assembly
from omnidraft.client import COMPLETIONS, OpenAIClient
from omnidraft.config import Settings
from omnidraft.demo.local_cluster import ServiceFailed, free_port, is_serving
from omnidraft.ports import Registry
from omnidraft.progress import bar
from tests.soak.acknowledged import AckMonitor
from tests.soak.cluster import START_TIMEOUT_S, Cluster, empty_folder, service_command, tiny_settings
from tests.soak.load_clients import load
from tests.soak.part import PartResult, SoakPlan

NUM_WORKERS = 3
NUM_ROLLBACKS = 10
MAX_S = 2.0
LEARN_TIMEOUT_S = 240.0
TAKE_UP_TIMEOUT_S = 60.0
POLL_S = 0.02
REST_S = 1.0
"""Seconds between two rollbacks, so that followers are idle when one comes."""


def run(plan: SoakPlan) -> PartResult:
    """Learn two snapshots, stop learning, then go back and forth between them."""
    with Cluster(empty_folder(plan.out / "rollback"), tiny_settings(plan.out / "models")) as cluster:
        cluster.start_all()
        urls = [cluster.url, *(_start_worker(cluster, number) for number in range(1, NUM_WORKERS))]
        registry = assembly.registry(cluster.settings)
        clients = load(cluster.url, AckMonitor(cluster.url), num_clients=2, pause_s=0.1, max_tokens=16)
        with clients:
            cluster.wait_for(
                lambda: len(registry.versions()) >= 2 and _has_previous(registry), "rollback", LEARN_TIMEOUT_S
            )
        cluster.stop("distiller")
        seconds = _back_and_forth(cluster.settings, registry, urls)
    figures = {
        "workers": len(urls),
        "rollbacks": len(seconds),
        "median_s": round(median(seconds), 3),
        "longest_s": round(max(seconds), 3),
        "seconds": [round(each, 3) for each in seconds],
    }
    return PartResult(figures, assertions(figures))


def assertions(figures: dict) -> dict[str, bool]:
    """Check the figures of this part."""
    return {f"a rollback is in effect on every worker within {MAX_S:.0f} s": figures["longest_s"] <= MAX_S}


def _start_worker(cluster: Cluster, number: int) -> str:
    """Start another worker of the same settings at a port of its own; return its URL."""
    port = free_port()
    command = service_command("decode_worker", cluster.config_path)
    cluster.start(f"decode_worker-{number}", ["env", f"OMNIDRAFT_WORKER__PORT={port}", *command])
    url = f"http://127.0.0.1:{port}"
    cluster.wait_for(lambda: is_serving(url), f"ready worker {number}", START_TIMEOUT_S)
    return url


def _has_previous(registry: Registry) -> bool:
    return any("previous" in each.aliases for each in registry.versions())


def _back_and_forth(settings: Settings, registry: Registry, urls: Sequence[str]) -> list[float]:
    """Return the seconds of each rollback, from the command to the last worker; all have both snapshots in memory."""
    control = assembly.ordering_log(settings)
    _wait(urls, registry.resolve("champion").version)
    seconds = []
    with bar("rollbacks", NUM_ROLLBACKS) as advance:
        for _ in range(NUM_ROLLBACKS):
            time.sleep(REST_S)
            started = time.monotonic()
            previous = registry.resolve("previous").version
            assembly.order_champion(settings, control, previous)
            _wait(urls, previous)
            seconds.append(time.monotonic() - started)
            advance()
    return seconds


def _wait(urls: Sequence[str], version: int) -> None:
    """Wait until all workers serve this version. Raises ServiceFailed."""
    deadline = time.monotonic() + TAKE_UP_TIMEOUT_S
    while any(_served(url) != version for url in urls):
        if time.monotonic() > deadline:
            raise ServiceFailed(f"version {version} is not served everywhere after {TAKE_UP_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


def _served(url: str) -> int | None:
    """Return the snapshot version that a one-token answer names."""
    body = {"prompt": "x", "max_tokens": 1, "temperature": 0, "store": False, "figures": True}
    with OpenAIClient(url, timeout_s=TAKE_UP_TIMEOUT_S) as api:
        version: int | None = api.ask(COMPLETIONS, body).stats["snapshot_version"]
    return version
