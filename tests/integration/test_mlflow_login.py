"""A real MLflow server with deploy/mlflow/basic_auth.ini: 401 without a login, and our own client works with it."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from omnidraft import assembly, config
from omnidraft.assembly.registries import snapshot_reader
from omnidraft.demo.local_cluster import free_port
from omnidraft.errors import RegistryError, SnapshotNotFound

INI = Path(__file__).parents[2] / "deploy/mlflow/basic_auth.ini"
USER, PASSWORD = "omnidraft", secrets.token_hex(32)
LOGIN = {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": PASSWORD}
START_S = 200.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that is up."""
    folder = tmp_path_factory.mktemp("mlflow")
    logins = folder / "basic_auth.ini"
    logins.write_text(INI.read_text().replace("sqlite:////mlflow/logins.db", f"sqlite:///{folder}/logins.db"))
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--app-name=basic-auth", "--host=127.0.0.1", f"--port={port}"]
    command += ["--workers=1", f"--backend-store-uri=sqlite:///{folder}/mlflow.db"]
    command += [f"--artifacts-destination={folder}/artifacts"]
    told = {
        "MLFLOW_AUTH_CONFIG_PATH": str(logins),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER,
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | told, stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(url, process, folder / "log")
        yield url
    finally:
        os.killpg(process.pid, 9)
        process.wait(30)


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    pytest.fail(f"MLflow did not start: {log.read_text()[-3000:]}")


def settings(server: str) -> config.Settings:
    return config.load(None, {"OMNIDRAFT_REGISTRY__URL": server})


def test_without_the_login_nobody_reads_or_writes(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    search = f"{server}/api/2.0/mlflow/experiments/search?max_results=5"
    model = f"{server}/api/2.0/mlflow/registered-models/create"
    assert httpx.get(search, timeout=30).status_code == 401
    assert httpx.post(model, json={"name": "forged"}, timeout=30).status_code == 401
    assert httpx.get(search, auth=(USER, "wrong"), timeout=30).status_code == 401
    assert httpx.get(search, auth=(USER, PASSWORD), timeout=30).status_code == 200
    for name in LOGIN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RegistryError):
        assembly.registry(settings(server)).versions()


def test_the_services_client_works_with_it(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LOGIN.items():
        monkeypatch.setenv(name, value)
    assert list(assembly.registry(settings(server)).versions()) == []
    with pytest.raises(SnapshotNotFound):  # the registry answers
        snapshot_reader(settings(server)).resolve("champion")
