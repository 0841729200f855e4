"""docker-compose.yml in a real engine: the image of deploy/Dockerfile, stand-ins where no image can be pulled, and
a fleet on tiny models with a project name, ports and secrets of its own."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from omnidraft.demo.local_cluster import free_port
from omnidraft.testing.tiny_models import make_drafter, make_target
from tests.deployment_secrets import run_script, variables_in
from tests.kafka_fixture import load_local_broker

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
DOCKERFILE = ROOT / "deploy/Dockerfile"
COMPOSE_FILES = (ROOT / "docker-compose.yml", HERE / "compose.small.yaml")
ROOTS = Path(os.environ.get("OMNIDRAFT_TEST_CACHE") or Path.home() / ".cache/omnidraft-tests", "containers")
PROJECT = TAG = "omnidraft-test"
IMAGE = f"omnidraft:{TAG}"
LABEL = "omnidraft.stand-in"
ENVIRON = {"DOCKER_BUILDKIT": "1", "COMPOSE_BAKE": "false", "OMNIDRAFT_TAG": TAG}
BUILD_ARGUMENTS = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "TORCH_BACKEND", "TORCH_INDEX")
BUILD_S, COMMAND_S, READY_S = 3600, 300, 900
SERVICES = ("kafka", "postgres", "mlflow", "distiller", "controller", "worker", "prometheus", "grafana")
"""Those that run on; in this order they are killed."""


def docker(*arguments: object, timeout_s: float = COMMAND_S, **environ: str) -> subprocess.CompletedProcess[str]:
    """What a client of the engine said."""
    command = [os.environ.get("DOCKER", "docker"), *map(str, arguments)]
    environ = {**os.environ, **ENVIRON, **environ}
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=timeout_s
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    """Standard output of a command that must succeed."""
    assert done.returncode == 0, f"{done.args}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
    return done.stdout


def require_engine() -> None:
    """Ends the run where there is none."""
    for command in (("info",), ("compose", "version")):
        try:
            done = docker(*command)
        except FileNotFoundError:
            pytest.exit("no `docker` on the path: make test-containers needs an engine (tests/containers/engine.sh)", 2)
        if done.returncode:
            what = f"`docker {' '.join(command)}`: {done.stderr.strip()}"
            pytest.exit(f"make test-containers needs an engine with Compose (tests/containers/engine.sh): {what}", 2)


def build_image() -> list[str]:
    """Build the image as docs/deploy.md does; return what stands in for base images that cannot be had."""
    named = {re.findall(r"^FROM (\S+:\S+)", DOCKERFILE.read_text(), re.M)[0]}
    named |= {each["image"] for each in yaml.safe_load(COMPOSE_FILES[0].read_text())["services"].values()}
    stood_in = sorted(image for image in named if not image.startswith("omnidraft:") and not _is_had(image))
    if stood_in:
        _stand_in(stood_in)
    given = {name: os.environ[name] for name in BUILD_ARGUMENTS if name in os.environ}
    if stood_in:  # nor can PyTorch's index be reached
        given.setdefault("TORCH_BACKEND", "")
    arguments = [part for name, value in given.items() for part in ("--build-arg", f"{name}={value}")]
    told(docker("build", "--file", DOCKERFILE, "--tag", IMAGE, *arguments, ".", timeout_s=BUILD_S))
    return stood_in


def _is_had(image: str) -> bool:
    inspected = docker("image", "inspect", "--format", "{{json .Config.Labels}}", image)
    return (inspected.returncode == 0 and LABEL not in inspected.stdout) or docker("pull", image).returncode == 0


def _stand_in(images: list[str]) -> None:
    ROOTS.mkdir(parents=True, exist_ok=True)
    for suite in ("bookworm", "trixie"):
        if not (ROOTS / f"{suite}.tar").exists():
            command = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates", suite]
            told(subprocess.run([*command, ROOTS / f".{suite}.tar"], capture_output=True, text=True, check=False))
            (ROOTS / f".{suite}.tar").rename(ROOTS / f"{suite}.tar")
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", ROOTS)
    shutil.copytree(
        HERE, ROOTS, dirs_exist_ok=True, ignore=lambda _, names: [n for n in names if not n.endswith(".sh")]
    )
    shutil.copytree(load_local_broker().fetch_jars(), ROOTS / "jars", dirs_exist_ok=True)
    for image in images:
        stage = image.partition(":")[0].rpartition("/")[2]
        options = ("--file", HERE / "Dockerfile", "--target", stage, "--tag", image, "--label", f"{LABEL}={stage}")
        told(docker("build", *options, ROOTS, timeout_s=BUILD_S))


@dataclass
class Fleet:
    """The services of docker-compose.yml; secrets, models and logs are in `folder`."""

    folder: Path
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.secrets = self.folder / "env"
        done = run_script(self.secrets)
        assert done.returncode == 0, done.stderr
        make_target(self.folder / "models/target", spread=0.3)
        make_drafter(self.folder / "models/drafter")
        told(subprocess.run(["chmod", "-R", "a+rX", self.folder], capture_output=True, text=True, check=False))

    @property
    def url(self) -> str:
        """Of the first worker."""
        return f"http://127.0.0.1:{self.port}"

    def compose(
        self, *arguments: object, ports: str = "", timeout_s: float = READY_S
    ) -> subprocess.CompletedProcess[str]:
        """What `docker compose` said. Args: ports: of workers, of which there is one else."""
        files = [part for file in COMPOSE_FILES for part in ("--file", file)]
        options = ("--project-name", PROJECT, "--env-file", self.secrets, *files)
        given = {"SMALL_MODELS": str(self.folder / "models"), "WORKER_PORTS": ports or str(self.port)}
        return docker("compose", *options, *arguments, timeout_s=timeout_s, **given)

    def operator(self, *command: str) -> subprocess.CompletedProcess[str]:
        """What the command line said as docs/deploy.md starts it."""
        made = variables_in(self.secrets)
        login = {
            "OMNIDRAFT_LOG__KAFKA__USERNAME": "omnidraft-operator",
            "OMNIDRAFT_LOG__KAFKA__PASSWORD": made["OMNIDRAFT_KAFKA_OPERATOR_PASSWORD"],
            "OMNIDRAFT_REGISTRY__PRIVATE_KEY": made["OMNIDRAFT_OPERATOR_PRIVATE_KEY"],
        }
        variables = [part for name, value in login.items() for part in ("-e", f"{name}={value}")]
        return self.compose("run", "--rm", "-T", *variables, "controller", *command, "--config", "/app/settings.toml")

    def containers(self, service: str = "") -> list[Mapping[str, Any]]:
        """What the engine knows of each, those that have ended too."""
        ids = told(self.compose("ps", "--all", "--quiet", *filter(None, [service]))).split()
        inspected: list[Mapping[str, Any]] = json.loads(told(docker("inspect", *ids))) if ids else []
        return inspected

    def wait_until_healthy(self) -> None:
        """Those without a health check run."""
        self.wait_for(lambda: not self.ailing(), lambda: f"unhealthy: {self.ailing()}")

    def ailing(self) -> list[str]:
        """Containers that are not as they should be, and services that have none."""
        states = [
            (each["Config"]["Labels"]["com.docker.compose.service"], _state(each["State"]))
            for each in self.containers()
        ]
        missing = set(SERVICES) - {service for service, _ in states}
        wrong = [
            f"{service} is {state}" for service, state in states if state not in ("healthy", "running", "exited 0")
        ]
        return sorted(missing) + wrong

    def kill(self, service: str) -> None:
        """SIGKILL for the whole container at once, as for a lack of memory; the engine starts it again."""
        (container,) = self.containers(service)
        helper = ("run", "--rm", "--pid=host", "--user=0", IMAGE, "kill", "-9", container["State"]["Pid"])
        told(docker(*helper))
        began = container["State"]["StartedAt"]
        self.wait_for(lambda: self.containers(service)[0]["State"]["StartedAt"] != began, lambda: f"{service} is down")

    def address(self, service: str, port: int, index: int = 1) -> str:
        """Where this host finds a port of a container."""
        return "http://" + told(self.compose("port", "--index", index, service, port)).strip()

    def wait_for(self, is_so: Callable[[], bool], otherwise: Callable[[], str], timeout_s: float = READY_S) -> None:
        """Ask every two seconds."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, otherwise()
            time.sleep(2)

    def remove(self) -> None:
        """With all its data; what it logged stays in runs/containers."""
        kept = ROOT / "runs/containers"
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "compose.log").write_text(self.compose("logs", "--no-color", "--timestamps").stdout)
        self.compose("down", "--volumes", "--timeout", 5)


def _state(state: Mapping[str, Any]) -> str:
    if not state["Running"]:
        return f"{state['Status']} {state['ExitCode']}"
    return str(state["Health"]["Status"] if "Health" in state else state["Status"])
