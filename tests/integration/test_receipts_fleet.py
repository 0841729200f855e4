"""Receipts of a fleet that learns, swaps its drafter and loses its worker are verified where nothing drafts."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from omnidraft import assembly, config
from omnidraft.decode.receipt import read_receipt
from omnidraft.demo.local_cluster import LocalCluster, free_port, is_serving
from omnidraft.snapshots.keys import PrivateKey, new_private_key
from tests.cli_runs import tiny_pair_environ

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

NUM_ANSWERS, NUM_CLIENTS, NUM_TOKENS = 64, 8, 24
PATIENCE_S = 240.0
SETTINGS = """
[decode]
mode = "reproducible"
policy = "fixed"
[log]
url = "sqlite:///{root}/log.db"
[registry]
url = "directory:///{root}/registry"
[learner]
records_per_step = 2
steps_per_snapshot = 2
[worker]
port = {port}
"""


class Fleet(LocalCluster):
    """Controller, distiller and worker over SQLite, all files below one folder.

    Args:
        environ: names the models.
    """

    def __init__(self, root: Path, environ: dict[str, str]) -> None:
        self.secret, port = new_private_key(), free_port()
        self.url, self.root, self.config_path = f"http://127.0.0.1:{port}", root, root / "settings.toml"
        self.config_path.write_text(SETTINGS.format(root=root, port=port))
        self.environ = environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        super().__init__(root / "logs", self.environ | {"OMNIDRAFT_WORKER__RECEIPT_KEY": self.secret})
        self.settings = config.load(self.config_path, environ)

    def bring_up(self, name: str) -> None:
        self.start(name, [sys.executable, "-m", "omnidraft.cli", "run", name, "--config", str(self.config_path)])
        if name == "worker":
            self.wait_for(lambda: is_serving(self.url), "serving worker", PATIENCE_S)

    def kill_worker(self) -> None:
        process = self._processes.pop("worker")
        process.kill()
        process.wait()
        self.bring_up("worker")

    def swap_to(self, version: int) -> None:
        """Let the worker draft with this version, once it was learned, or a later one that was promoted."""
        registry = assembly.registry(self.settings)
        self.wait_for(lambda: registry.versions()[-1].version >= version, f"version {version}", PATIENCE_S)
        with closing(assembly.ordering_log(self.settings)) as control:
            self.wait_for(
                lambda: assembly.order_champion(self.settings, control, version) is not None, "order", PATIENCE_S
            )
        self.wait_for(lambda: self._drafts_with() >= version, f"worker at version {version}", PATIENCE_S)

    def _drafts_with(self) -> int:
        body = {"prompt": "1", "max_tokens": 1, "store": False, "figures": True}
        version: int | None = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S).json()[
            "omnidraft"
        ]["snapshot_version"]
        return version or 0

    def verify(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Another process, without a drafter."""
        command = (sys.executable, "-m", "omnidraft.cli", "verify", *arguments, "--num-draft-tokens", 0)
        return subprocess.run(
            [*map(str, command), "--config", str(self.config_path)],
            capture_output=True,
            text=True,
            env=self.environ,
            check=False,
        )


@contextmanager
def started(root: Path, environ: dict[str, str]) -> Iterator[Fleet]:
    with Fleet(root, environ) as fleet:
        for name in ("controller", "distiller"):
            fleet.bring_up(name)
        registry = assembly.registry(fleet.settings)
        fleet.wait_for(lambda: bool(registry.versions()), "first version", PATIENCE_S)
        fleet.bring_up("worker")
        yield fleet


def saved_answers(fleet: Fleet, events: tuple[Callable[[], None], ...]) -> list[Path]:
    """Responses to all clients, saved; each event happens after its share of them, with requests under way."""
    per_event = NUM_ANSWERS // (len(events) + 1)
    allowed, answered = threading.Semaphore(per_event + NUM_CLIENTS), []

    def ask(number: int) -> Path:
        message = {"role": "user", "content": f"Question {number}: what is {number} times {number + 3}?"}
        body = {"messages": [message], "max_tokens": NUM_TOKENS, "temperature": (0, 0.8)[number % 2], "receipt": True}
        allowed.acquire()
        while True:
            try:
                response = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
            except httpx.TransportError:  # it was killed
                time.sleep(0.2)
                continue
            assert response.status_code == 200, response.text
            path = fleet.root / f"answer-{number}.json"
            path.write_bytes(response.content)
            answered.append(path)
            return path

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        paths = clients.map(ask, range(NUM_ANSWERS))
        try:
            for number, event in enumerate(events, 1):
                fleet.wait_for(lambda number=number: len(answered) >= number * per_event, "answers", PATIENCE_S)
                event()
                allowed.release(per_event)
        finally:
            allowed.release(NUM_ANSWERS)
        return list(paths)


def test_64_answers_of_8_clients_are_computed_again(
    tmp_path: Path, tiny_models: tuple[Path, Path], omnidraft_home: Path
) -> None:
    check_receipts(tmp_path, config.without_settings(os.environ) | tiny_pair_environ(omnidraft_home, tiny_models))


def check_receipts(root: Path, environ: dict[str, str]) -> None:
    """Raise unless all answers are verified, from their receipts and from the log."""
    with started(root, environ) as fleet:
        events = (lambda: fleet.swap_to(2), fleet.kill_worker, lambda: fleet.swap_to(3))
        paths = saved_answers(fleet, events)
    receipts = [read_receipt(json.loads(path.read_bytes())["choices"][0]["receipt"]) for path in paths]
    assert len({each.snapshot_version for each in receipts if each.snapshot_version}) >= 3
    done = fleet.verify(*paths, "--key", PrivateKey(fleet.secret).public_text("worker"))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{NUM_ANSWERS} of {NUM_ANSWERS}: the same bits"), (
        done
    )
    logged = fleet.verify("--from-log", "--target", fleet.settings.models.target)
    assert logged.returncode == 0, logged
    print(done.stdout, logged.stdout)
