"""deploy/ and docker-compose.yml: every file loads, every service starts something that exists."""

import configparser
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from omnidraft import config
from omnidraft.decode.recording.trace_producer import DRAIN_S
from omnidraft.snapshots.keys import PrivateKey
from tests.deployment_secrets import run_script, substituted, variables_in

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "deploy" / "config").glob("*.toml"))
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = ("distiller", "controller", "worker")
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
CHECK = Path(sys.executable).with_name("check-jsonschema")
TEXT = (".yaml", ".yml", ".toml", ".py", ".json", ".md", "")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_settings_file_loads(path):
    assert config.load(path, environ={}).models.target


def test_local_settings_need_no_server():
    settings = config.load(ROOT / "deploy/config/local.toml", environ={})
    assert settings.log.url.startswith("sqlite:///")
    assert settings.registry.url.startswith("sqlite:///")


def words(service: str) -> list[str]:
    """Its command, that of a shell too."""
    command = COMPOSE["services"][service]["command"]
    return command[-1].split() if command[:2] == ["sh", "-c"] else command


@pytest.mark.parametrize("service", OURS)
def test_a_service_runs_a_module_that_exists_on_settings_that_are_mounted(service):
    python, dash_m, module, option, inside = words(service)[-5:]
    assert (python, dash_m, option) == ("python", "-m", "--config")
    assert importlib.util.find_spec(f"{module}.__main__")
    mounts = {mount.split(":")[1]: mount.split(":")[0] for mount in COMPOSE["services"][service]["volumes"]}
    assert (ROOT / mounts[inside]).is_file()


def test_the_compose_file_fits_the_specification():
    command = [CHECK, "--builtin-schema", "vendor.compose-spec", "docker-compose.yml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("service", OURS)
def test_every_variable_of_ours_is_a_setting(service):
    variables = COMPOSE["services"][service]["environment"]
    assert config.load(None, {name: substituted(value) for name, value in variables.items() if "__" in name})


def test_the_distiller_is_the_head_of_a_ray_cluster_that_has_a_place_for_it():
    settings = config.load(ROOT / "deploy/config/compose.toml", environ={})
    assert COMPOSE["services"]["distiller"]["environment"]["RAY_ADDRESS"] == "auto"
    command = " ".join(words("distiller"))
    assert command.startswith("ray start --head")
    (store,) = re.findall(r"--object-store-memory=(\d+) ", command)
    assert COMPOSE["services"]["distiller"]["shm_size"] == "1gb"
    assert int(store) < 2**30 * 0.95  # what Ray takes of shared memory
    (resources,) = re.findall(r"--resources='([^']+)'", command)
    assert json.loads(resources).items() >= dict(settings.learner.ray_resources).items()
    assert settings.learner.ray_resources


def test_ports_are_published_on_loopback_only():
    ports = [port for definition in COMPOSE["services"].values() for port in definition.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_no_file_of_the_deployment_holds_a_password():
    """What looks like one is a reference: to a variable, a mounted file, or a Kubernetes secret."""
    files = [
        ROOT / "docker-compose.yml",
        *(p for p in (ROOT / "deploy").rglob("*") if p.suffix in TEXT and p.is_file()),
    ]
    names = r"(?i)(?:password|passwd|secret(?!Name:)|api_?key|auth_?token)\w*[ \t]*[:=][ \t]*(?:&[\w-]+[ \t]+)?"
    told, told_by_code = re.compile(names + r"""["']?([^\s"']+)"""), re.compile(names + r"""["']([^\s"']+)""")
    for path in files:
        for value in (told_by_code if path.suffix == ".py" else told).findall(path.read_text()):
            assert value.startswith(("$", "*", "/run/secrets/", "{", "[", "#")), (path, value)


def test_the_image_copies_only_what_the_repository_has():
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M) for name in line.split()}
    copied |= set(re.findall(r"type=bind,source=(\S+),", DOCKERFILE))
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert copied == set(allowed)
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_worker_may_drain_before_it_is_stopped_by_force():
    settings = config.load(ROOT / "deploy/config/compose.toml", environ={})
    grace_s = float(COMPOSE["services"]["worker"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings.worker.drain_timeout_s + DRAIN_S


def test_hadolint_finds_nothing_in_the_dockerfile():
    command = [CHECK.with_name("hadolint"), ROOT / "deploy/Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_for_processors_or_gpus_and_never_root():
    """Kubernetes can only tell a number from root."""
    assert re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.M) == [("10001", "10001")]
    extras = set(re.findall(r"--extra (\w+)", DOCKERFILE))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras <= set(known)


def test_the_image_tells_nobody_of_its_use_and_mlflow_runs_no_jobs():
    assert set(DOCKERFILE.split()) >= {
        "RAY_USAGE_STATS_ENABLED=0",
        "MLFLOW_DISABLE_TELEMETRY=true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false",
    }


def test_no_container_gains_rights_or_fills_the_disk_with_its_log():
    for name, definition in COMPOSE["services"].items():
        assert definition["security_opt"] == ["no-new-privileges:true"], name
        assert definition["logging"]["options"].keys() == {"max-size", "max-file"}, name


def rights() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((ROOT / "deploy/kafka/rights.toml").read_text())


def test_rights_are_about_our_topics_and_every_service_has_a_login_with_its_own():
    log = config.load(ROOT / "deploy/config/compose.toml", environ={}).log
    topics = {topic for granted in rights().values() for topic in granted}
    assert topics == {log.traces_topic, log.dead_letters_topic, log.control_topic}
    for service in OURS:
        variables = COMPOSE["services"][service]["environment"]
        assert variables["OMNIDRAFT_LOG__KAFKA__SECURITY"].startswith("sasl")
        assert variables["OMNIDRAFT_LOG__KAFKA__USERNAME"] == f"omnidraft-{service}"
        assert variables["OMNIDRAFT_LOG__KAFKA__PASSWORD"] == f"${{OMNIDRAFT_KAFKA_{service.upper()}_PASSWORD}}"
        assert COMPOSE["services"][service]["depends_on"]["kafka-rights"] == {
            "condition": "service_completed_successfully"
        }
    passwords = {name for name in COMPOSE["services"]["kafka-rights"]["environment"] if name.endswith("_PASSWORD")}
    users = {f"OMNIDRAFT_KAFKA_{user.removeprefix('omnidraft-').upper()}_PASSWORD" for user in rights()}
    assert passwords == users | {"OMNIDRAFT_LOG__KAFKA__PASSWORD"}


def test_the_broker_lets_nobody_in_without_a_login():
    variables = COMPOSE["services"]["kafka"]["environment"]
    protocols = dict(each.split(":") for each in variables["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(","))
    assert set(protocols.values()) == {"SASL_PLAINTEXT"}
    assert {each.split(":")[0] for each in variables["KAFKA_LISTENERS"].split(",")} == protocols.keys()
    assert variables["KAFKA_AUTHORIZER_CLASS_NAME"].endswith("StandardAuthorizer")
    assert "KAFKA_ALLOW_EVERYONE_IF_NO_ACL_FOUND" not in variables
    assert variables["KAFKA_SUPER_USERS"] == "User:admin"


def test_mlflow_wants_the_login_that_the_services_have():
    assert "--app-name=basic-auth" in words("mlflow")
    server = COMPOSE["services"]["mlflow"]["environment"]
    for service in OURS:
        client = COMPOSE["services"][service]["environment"]
        assert client["MLFLOW_TRACKING_USERNAME"] == server["MLFLOW_AUTH_ADMIN_USERNAME"]
        assert client["MLFLOW_TRACKING_PASSWORD"] == server["MLFLOW_AUTH_ADMIN_PASSWORD"]
    settings = configparser.ConfigParser()
    settings.read(ROOT / "deploy/mlflow/basic_auth.ini")
    assert settings["mlflow"]["default_permission"] == "NO_PERMISSIONS"
    assert settings["mlflow"]["database_uri"] == "sqlite:////mlflow/logins.db"


def test_workers_verify_and_cannot_sign():
    keys = {
        service: {name: value for name, value in environment.items() if "REGISTRY__" in name}
        for service in OURS
        if (environment := COMPOSE["services"][service]["environment"])
    }
    assert all("OMNIDRAFT_REGISTRY__TRUSTED_KEYS" in of_service for of_service in keys.values())
    private = {name: each.get("OMNIDRAFT_REGISTRY__PRIVATE_KEY", "") for name, each in keys.items()}
    assert not private["worker"]
    assert "DISTILLER_PRIVATE_KEY" in private["distiller"]
    assert "CONTROLLER_PRIVATE_KEY" in private["controller"]


def test_the_script_makes_every_secret_that_compose_asks_for_once_and_for_its_owner(tmp_path):
    file = tmp_path / "env"
    assert run_script(file).returncode == 0
    made = variables_in(file)
    trusted = json.loads(made["OMNIDRAFT_TRUSTED_KEYS"])
    asked = set(re.findall(r"\$\{(\w+(?:PASSWORD|KEY|KEYS|TOKEN))\b", (ROOT / "docker-compose.yml").read_text()))
    asked |= {secret["environment"] for secret in COMPOSE["secrets"].values()}
    assert made.keys() == asked | {"OMNIDRAFT_OPERATOR_PRIVATE_KEY"}  # that one is for a shell, not for a service
    assert len(set(made.values())) == len(made)
    assert min(len(made[name]) for name in made if "PRIVATE" not in name) >= 64  # 256 bits
    for public in trusted:
        role = public.partition(":")[0]
        assert PrivateKey(made[f"OMNIDRAFT_{role.upper()}_PRIVATE_KEY"]).public_text(role) == public
    assert len(trusted) == 3
    assert file.stat().st_mode & 0o777 == 0o600
    again = run_script(file)
    assert (again.returncode, "stays" in again.stderr) == (1, True)
    assert variables_in(file) == made
    assert {".env", "secrets.json", "*.operator-key"} <= set((ROOT / ".gitignore").read_text().splitlines())


def test_no_secret_of_kubernetes_has_the_operators_key(tmp_path):
    assert run_script("--kubernetes", tmp_path / "secrets.json").returncode == 0
    key = tmp_path / "secrets.json.operator-key"
    text = (tmp_path / "secrets.json").read_text()
    public = PrivateKey(key.read_text().strip()).public_text("operator")
    assert key.stat().st_mode & 0o777 == 0o600
    assert public in text
    assert key.read_text().strip() not in text
    assert text.count("ed25519-private:") == 2  # the distiller's and the controller's
