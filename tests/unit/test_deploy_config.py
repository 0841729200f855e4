"""deploy/ and docker-compose.yml: every file loads, every service starts something that exists."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from omnidraft import config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "deploy" / "config").glob("*.toml"))
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = ("distiller", "controller", "worker")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_settings_file_loads(path):
    assert config.load(path, environ={}).models.target


def test_both_deployments_have_a_settings_file():
    assert {path.name for path in CONFIGS} >= {"local.toml", "compose.toml"}


def test_local_settings_need_no_server():
    settings = config.load(ROOT / "deploy/config/local.toml", environ={})
    assert settings.log.url.startswith("sqlite:///")
    assert settings.registry.url.startswith("sqlite:///")


def test_compose_settings_name_services_of_the_compose_file():
    settings = config.load(ROOT / "deploy/config/compose.toml", environ={})
    hosts = re.findall(r"//([^:/]+):", f"{settings.log.url} {settings.registry.url}")
    assert hosts == ["kafka", "mlflow"]
    assert set(hosts) <= set(COMPOSE["services"])
    assert settings.worker.port == int(COMPOSE["services"]["worker"]["ports"][0].split(":")[-1])


@pytest.mark.parametrize("service", OURS)
def test_a_service_runs_a_module_that_exists_on_settings_that_are_mounted(service):
    definition = COMPOSE["services"][service]
    python, dash_m, module, option, inside = definition["command"]
    assert (python, dash_m, option) == ("python", "-m", "--config")
    assert importlib.util.find_spec(f"{module}.__main__")
    mounts = {mount.split(":")[1]: mount.split(":")[0] for mount in definition["volumes"]}
    assert (ROOT / mounts[inside]).is_file()


def test_every_volume_is_declared_and_every_dependency_is_a_service():
    for definition in COMPOSE["services"].values():
        named = {m.split(":")[0] for m in definition.get("volumes", ()) if not m.startswith("./")}
        assert named <= set(COMPOSE["volumes"])
        assert set(definition.get("depends_on", ())) <= set(COMPOSE["services"])


def test_waiting_for_health_is_only_asked_of_services_that_report_it():
    for definition in COMPOSE["services"].values():
        for name, wait in definition.get("depends_on", {}).items():
            assert wait["condition"] != "service_healthy" or "healthcheck" in COMPOSE["services"][name]


def test_mlflow_accepts_requests_that_name_its_service():
    allowed = next(arg for arg in COMPOSE["services"]["mlflow"]["command"] if arg.startswith("--allowed-hosts="))
    assert "mlflow:5000" in allowed.removeprefix("--allowed-hosts=").split(",")


def test_ports_are_published_on_loopback_only():
    ports = [port for definition in COMPOSE["services"].values() for port in definition.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_no_file_of_the_deployment_holds_a_password():
    files = [ROOT / "docker-compose.yml", *(p for p in (ROOT / "deploy").rglob("*") if p.is_file())]
    for path in files:
        assert not re.search(r"(?i)(password|passwd|secret)\w*\s*[:=]\s*\S", path.read_text()), path


def test_the_image_copies_only_what_the_repository_has():
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.M) for name in line.split()]
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(allowed)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_worker_may_drain_before_it_is_stopped_by_force():
    settings = config.load(ROOT / "deploy/config/compose.toml", environ={})
    grace_s = float(COMPOSE["services"]["worker"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings.worker.drain_timeout_s + settings.recorder.drain_timeout_s
