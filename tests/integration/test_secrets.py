"""No secret is shown: not by settings, not by what is refused, not by `status`, `doctor`, `--help` or a log line."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from omnidraft import config
from omnidraft.config.secrets import masked
from omnidraft.errors import ConfigError
from omnidraft.snapshots.keys import PrivateKey
from tests.cli_runs import run_cli

ROOT = Path(__file__).parents[2]
KEY, OTHER_KEY = "c2VjcmV0" * 5 + "c2U=", "aGlkZGVu" * 5 + "aGk="
PRIVATE_KEY = f"ed25519-private:{OTHER_KEY}"
PASSWORD = "hunter2-kafka"
SECRETS = (KEY, OTHER_KEY, PASSWORD, "hunter2-url", "hunter2-mlflow", "hunter2-file")
ENVIRON = {
    "OMNIDRAFT_LOG__ENCRYPTION_KEYS": json.dumps([KEY]),
    "OMNIDRAFT_REGISTRY__PRIVATE_KEY": PRIVATE_KEY,
    "OMNIDRAFT_REGISTRY__TRUSTED_KEYS": json.dumps([PrivateKey(PRIVATE_KEY).public_text("operator")]),
    "OMNIDRAFT_LOG__KAFKA__SECURITY": "sasl_plaintext",
    "OMNIDRAFT_LOG__KAFKA__USERNAME": "alice",
    "OMNIDRAFT_LOG__KAFKA__PASSWORD": PASSWORD,
    "OMNIDRAFT_LOG__KAFKA__KEY_PASSWORD": "hunter2-file",
    "OMNIDRAFT_LOG": "kafka://127.0.0.1:9",
    "OMNIDRAFT_LOG__REQUEST_TIMEOUT_S": "0.3",
    "MLFLOW_TRACKING_URI": "http://bob:hunter2-url@127.0.0.1:9",
    "MLFLOW_TRACKING_USERNAME": "bob",
    "MLFLOW_TRACKING_PASSWORD": "hunter2-mlflow",
}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(
    tiny_models: tuple[Path, Path],
    omnidraft_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    monkeypatch.chdir(tmp_path)
    target, drafter = map(str, tiny_models)
    models = {"OMNIDRAFT_MODELS__TARGET": target, "OMNIDRAFT_MODELS__DRAFTER": drafter, "COLUMNS": "250"}
    environ = ENVIRON | models | {"OMNIDRAFT_HOME": str(omnidraft_home)}
    return lambda *arguments, **more: run_cli(arguments, monkeypatch, capsys, environ | more)


def assert_nothing_shown(text: str) -> None:
    assert [secret for secret in SECRETS if secret in text] == []


def test_settings_do_not_show_them_in_any_form() -> None:
    settings = config.load(None, ENVIRON)
    shown = repr(settings) + str(settings) + settings.model_dump_json() + str(settings.model_dump(mode="json"))
    assert_nothing_shown(shown)
    assert "http://***@127.0.0.1:9" in shown
    assert settings.registry.url == ENVIRON["MLFLOW_TRACKING_URI"]  # who connects has it
    assert [key.get_secret_value() for key in settings.log.encryption_keys] == [KEY]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OMNIDRAFT_LOG__ENCRYPTION_KEYS", json.dumps(["hunter2-file"]), "32 bytes in URL-safe base64"),
        ("OMNIDRAFT_LOG__ENCRYPTION_KEYS", "hunter2-file", "given as JSON"),
        ("OMNIDRAFT_LOG__ENCRYPTION_KEYS", '{"hunter2-file": 1}', "valid tuple"),
        ("OMNIDRAFT_LOG__ENCRYPTION_KEYS", '[{"hunter2-file": 1}]', "valid string"),
        ("OMNIDRAFT_REGISTRY__PRIVATE_KEY", "hunter2-file", "snapshots new-key"),
        ("OMNIDRAFT_LOG__KAFKA__SECURITY", "tls", "ssl"),
        ("OMNIDRAFT_LOG__KAFKA__CERT_FILE", "/certificate", "belong together"),
        ("OMNIDRAFT_LOG", "kafka://alice:hunter2-url@host:9092", "not a log"),
        ("OMNIDRAFT_LOG", "kafka://alice@host:9092", "not a log"),
        ("MLFLOW_TRACKING_URI", "ftp://bob:hunter2-url@host", "not a registry"),
        ("MLFLOW_TRACKING_URI", "ftp://bob:hunter2-url@with@host", "not a registry"),
        ("OMNIDRAFT_LOG__KAFKA", PASSWORD, "given as JSON"),
    ],
)
def test_a_setting_that_is_refused_is_named_and_no_secret_is_quoted(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load(None, ENVIRON | {name: value})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert_nothing_shown(str(refused.value))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("doctor",), 1),
        (("doctor", "--json"), 1),
        (("status", "--worker", "http://127.0.0.1:9"), 1),
        (("status", "--worker", "http://127.0.0.1:9", "--json"), 1),
        (("traces", "tail"), 2),
        (("traces", "dead-letters", "list"), 2),
        (("snapshots", "list"), 2),
        (("--help",), 0),
        (("traces", "--help"), 0),
        (("run", "worker", "--help"), 0),
    ],
)
def test_no_command_shows_them_while_nothing_can_be_reached(
    command: Run, caplog: pytest.LogCaptureFixture, arguments: tuple[str, ...], code: int
) -> None:
    with caplog.at_level(logging.DEBUG):
        done = command(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout + done.stderr
    assert_nothing_shown(done.stdout + done.stderr + caplog.text)


def test_a_service_does_not_show_them_while_nothing_can_be_reached(
    omnidraft_home: Path, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """It ends its process, so it has one of its own."""
    target, drafter = map(str, tiny_models)
    models = {"OMNIDRAFT_MODELS__TARGET": target, "OMNIDRAFT_MODELS__DRAFTER": drafter}
    environ = os.environ | ENVIRON | models | {"OMNIDRAFT_HOME": str(omnidraft_home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "omnidraft.cli", "run", "controller"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=100)
    assert done.returncode == 2, done.stderr
    assert "127.0.0.1:9" in done.stderr
    assert_nothing_shown(done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at http://me:pw@host:1/x?y=1: down", "at http://***@host:1/x?y=1: down"),
        ("postgresql+psycopg2://me:p@ss@db/x", "postgresql+psycopg2://***@db/x"),
        ("http://token@host http://a:b@c", "http://***@host http://***@c"),
        ("postgresql://db/x?user=u&password=pw&sslmode=on", "postgresql://db/x?user=u&password=***&sslmode=on"),
        ("sqlite:////tmp/me@home/log.db", "sqlite:////tmp/me@home/log.db"),
        ("http://host/path/a@b", "http://host/path/a@b"),
        ("mail me@host", "mail me@host"),
    ],
)
def test_only_credentials_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown
