"""An MLflow server on a private PostgreSQL cluster: what the fleet's registry is deployed on.

OMNIDRAFT_REQUIRE_POSTGRES=1 turns the skip without PostgreSQL into a failure. PostgreSQL refuses to run as root, so
root starts it as a user without rights.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from omnidraft.demo.local_cluster import free_port

HOST = "127.0.0.1"
DATABASE = "postgres"
START_S = 90.0
UNPRIVILEGED = "nobody"
DEBIAN = Path("/usr/lib/postgresql")
SETTINGS = ("fsync=off", "shared_buffers=16MB", "max_connections=40", f"listen_addresses={HOST}")


def skip_without_postgres(why: str) -> None:
    """Never returns."""
    if os.environ.get("OMNIDRAFT_REQUIRE_POSTGRES") == "1":
        pytest.fail(f"OMNIDRAFT_REQUIRE_POSTGRES=1, but {why}")
    pytest.skip(why)


@dataclass
class Postgres:
    """A cluster of one database, and the process that serves it."""

    programs: Path
    folder: Path
    port: int
    user: str | None
    """None: the one that runs the tests."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Without the password, which clients read from PGPASSWORD."""
        return f"postgresql://mlflow@{HOST}:{self.port}/{DATABASE}"

    @property
    def environ(self) -> dict[str, str]:
        """For its clients."""
        return {"PGPASSWORD": (self.folder / "password").read_text()}

    def create(self) -> None:
        """An empty cluster whose only user needs a password."""
        command = [self.programs / "initdb", "-D", self.folder / "data", "-U", "mlflow", "-A", "scram-sha-256"]
        command += ["--pwfile", self.folder / "password", "--locale", "C.UTF-8", "--no-sync"]
        done = subprocess.run(command, user=self.user, capture_output=True, text=True, check=False, cwd=self.folder)
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Until it takes connections."""
        command = [str(self.programs / "postgres"), "-D", self.folder / "data", "-p", str(self.port), "-k", self.folder]
        command += [part for each in SETTINGS for part in ("-c", each)]
        with (self.folder / "postgres.log").open("ab") as log:
            self.process = subprocess.Popen(command, user=self.user, stdout=log, stderr=log, cwd=self.folder)
        _wait_until(lambda: _listens(self.port), "PostgreSQL", self.folder / "postgres.log", self.process)

    def stop(self) -> None:
        """SIGINT: connections are cut, as in a restart."""
        if self.process is not None:
            self.process.send_signal(2)
            self.process.wait(START_S)


def find_programs() -> Path | None:
    """The folder with initdb and postgres, of the newest version."""
    versions = sorted(DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    found = str(versions[-1]) if versions else shutil.which("initdb")
    return Path(found).parent if found else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A running cluster, thrown away in the end."""
    programs = find_programs()
    if programs is None:
        skip_without_postgres("there is no PostgreSQL (Debian: apt-get install postgresql)")
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="omnidraft-postgres-"))  # pytest's own folders keep other users out
    (folder / "password").write_text(os.urandom(16).hex())
    if user is not None:
        shutil.chown(folder, user)
        shutil.chown(folder / "password", user)
    started = Postgres(programs, folder, free_port(), user)
    try:
        started.create()
        started.start()
        yield started
    finally:
        started.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_mlflow_url(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An MLflow server as docker-compose.yml starts it, with several processes and the files behind it."""
    folder, port = tmp_path_factory.mktemp("mlflow-server"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", postgres.url]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    command += ["--host", HOST, "--port", str(port), "--workers", "2"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **postgres.environ}, cwd=folder, start_new_session=True
        )
    url = f"http://{HOST}:{port}"
    try:
        _wait_until(lambda: _is_healthy(url), "the MLflow server", folder / "server.log", process)
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(START_S)


def _listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex((HOST, port)) == 0


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _wait_until(is_done: Callable[[], bool], what: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not is_done():
        assert process.poll() is None, f"{what} ended: {log.read_text(errors='replace')[-3000:]}"
        assert time.monotonic() < deadline, f"{what} does not answer: {log.read_text(errors='replace')[-3000:]}"
        time.sleep(0.1)
