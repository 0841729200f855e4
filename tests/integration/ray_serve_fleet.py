"""A fleet on Ray Serve, started as an operator would, from deploy/ray/serve.yaml with tiny models in it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from omnidraft.hosts.ray_serve import deployment_name
from pipelines.lib.bytecode import bytecode_environment
from tests.http_server import threads_until_over

ROOT = Path(__file__).parents[2]
SERVE_YAML = ROOT / "deploy/ray/serve.yaml"
SERVE = Path(sys.executable).with_name("serve")
START_S = 180.0
CPUS = 0.2
"""Of each replica, so that four fit on two cores."""
QUICK = {"upscale_delay_s": 1, "downscale_delay_s": 600, "metrics_interval_s": 0.5, "look_back_period_s": 2}
REPLICAS = {"num_cpus": CPUS}


def description(port: int, settings: dict[str, Any], most_replicas: dict[str, int]) -> dict[str, Any]:
    """The repository's file for other models, a deployment each, and this machine."""
    told: dict[str, Any] = yaml.safe_load(SERVE_YAML.read_text())
    told["http_options"]["port"] = port
    (application,) = told["applications"]
    ingress, replicas = application["deployments"]
    application["args"] = {"settings": settings}
    application["deployments"] = [ingress]
    for target, most in most_replicas.items():
        its = deepcopy(replicas)
        scaling = its["autoscaling_config"] | QUICK | {"min_replicas": 1, "max_replicas": most}
        its |= {"name": deployment_name(target), "autoscaling_config": scaling, "ray_actor_options": REPLICAS}
        application["deployments"].append(its)
    return told


class ServeFleet:
    """`serve run` at work."""

    def __init__(self, folder: Path, told: dict[str, Any], environ: dict[str, str]) -> None:
        self.told = told
        self._file, self._log = folder / "serve.yaml", folder / "serve.log"
        known = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(16).hex()}
        self._environ = {**os.environ, **bytecode_environment(), **known, **environ}
        self.url = f"http://127.0.0.1:{told['http_options']['port']}"
        self._write()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [SERVE, "run", self._file],
                cwd=folder,
                env=self._environ,
                stdout=log,
                stderr=log,
                preexec_fn=_hears_interrupts,
            )

    def _write(self) -> None:
        self._file.write_text(yaml.safe_dump(self.told))

    @property
    def log(self) -> str:
        """What all its processes said."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text(errors="replace"))

    def deploy(self) -> None:
        """Hand `told` to the running cluster."""
        self._write()
        found = re.search(r"dashboard at (http://\S+)", self.log)
        assert found, self.log[-2000:]
        command = [SERVE, "deploy", "-a", found[1], self._file]
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def replicas(self, target: str) -> dict[str, dict[str, Any]]:
        """Facts of the replicas that answer, by the name of the worker."""
        answer = httpx.get(f"{self.url}/replicas", timeout=10)
        return {each["worker"]: each for each in answer.json() if each["target"] == target}

    def wait_for(
        self, is_done: Callable[[], bool], what: str, *, timeout_s: float = START_S, look_s: float = 0.5
    ) -> float:
        """The seconds it took."""
        started = time.monotonic()
        while not is_done():
            assert self.process.poll() is None, self.log[-4000:]
            assert time.monotonic() < started + timeout_s, f"no {what}: {self.log[-4000:]}"
            time.sleep(look_s)
        return time.monotonic() - started

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        """As Ctrl-C does; what is left of it after that is ended."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for each in psutil.wait_procs(family, timeout=20)[1]:
            each.kill()


def _hears_interrupts() -> None:
    """Also where the tests run in the background of a shell, which ignores Ctrl-C there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and how it ended."""

    seed: int
    is_stream: bool
    began_s: float
    ended_s: float
    status: int
    text: str
    told_error: str | None
    """In the stream, or as the body of a refusal."""
    has_ended: bool
    """Whether all of the answer came."""


@dataclass
class Load:
    """Clients that ask again and again, half of them for streams, each with seeds that come round."""

    url: str
    model: str
    num_tokens: int
    num_seeds: int
    asked: list[Asked] = field(default_factory=list)

    @contextmanager
    def running(self, num_clients: int) -> Iterator[None]:
        """All requests that were begun have ended when it is over."""
        with threads_until_over(*(partial(self._ask_on, number) for number in range(num_clients)), patience_s=120):
            yield

    def bad(self) -> Sequence[Asked]:
        """Those that did not end with a whole text."""
        return [each for each in self.asked if each.status != 200 or each.told_error or not each.has_ended]

    def longest_gap_s(self, since_s: float) -> float:
        """Without any text being finished."""
        ends = sorted(each.ended_s for each in self.asked if each.ended_s > since_s)
        return max(after - before for before, after in zip([since_s, *ends], ends, strict=False))

    def _ask_on(self, number: int, stop: threading.Event) -> None:
        with httpx.Client(timeout=60) as client:
            for turn in range(10_000):
                if stop.is_set():
                    return
                self.asked.append(self._ask(client, (number + turn) % self.num_seeds, is_stream=number % 2 == 1))

    def _ask(self, client: httpx.Client, seed: int, *, is_stream: bool) -> Asked:
        body = {"model": self.model, "prompt": "How many clips", "max_tokens": self.num_tokens, "temperature": 1}
        body |= {"seed": seed, "stream": is_stream}
        began_s, text, told_error, has_ended, status = time.monotonic(), "", None, False, 0
        try:
            with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                status = answer.status_code
                if is_stream and status == 200:
                    text, told_error, has_ended = _read_stream(answer)
                else:
                    answer.read()
                    text = answer.json()["choices"][0]["text"] if status == 200 else ""
                    told_error, has_ended = (None if status == 200 else answer.text), True
        except httpx.HTTPError as exc:
            told_error = repr(exc)
        return Asked(seed, is_stream, began_s, time.monotonic(), status, text, told_error, has_ended)


def _read_stream(answer: httpx.Response) -> tuple[str, str | None, bool]:
    """Text, error told, and whether it came to its end."""
    text, told_error, has_ended = "", None, False
    for line in answer.iter_lines():
        has_ended |= line == "data: [DONE]"
        if line.startswith("data: {"):
            told = json.loads(line.removeprefix("data: "))
            if "error" in told:
                told_error = told["error"]["message"]
            else:
                text += told["choices"][0]["text"]
    return text, told_error, has_ended
