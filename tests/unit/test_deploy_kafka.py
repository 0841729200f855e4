"""The scripts of deploy/kafka without a broker. With one: tests/integration/test_kafka_rights.py."""

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from omnidraft import assembly, config
from tests.kafka_fixture import load_local_broker

pytest.importorskip("kafka", reason="the kafka extra is not installed")
from kafka.admin import ACL, ACLFilter, ACLOperation, ACLPermissionType, ResourcePattern, ResourceType
from kafka.errors import NoError

GRANT = Path(__file__).parents[2] / "deploy/kafka/grant.py"
SLEEP = "import time; time.sleep(300)"


def brokers() -> list[psutil.Process]:
    """The brokers of local_broker: this process may have a real one, for other tests."""
    commands = {each: each.as_dict(["cmdline"])["cmdline"] or () for each in psutil.Process().children()}
    return [each for each, command in commands.items() if {SLEEP, "kafka.Kafka"} <= set(command)]


@pytest.fixture
def local_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Its brokers only sleep; `tmp_path` has the log of an earlier one."""
    module = load_local_broker()
    sleep = [sys.executable, "-c", SLEEP]
    monkeypatch.setattr(module, "fetch_jars", lambda: tmp_path)
    monkeypatch.setattr(module, "_java", lambda jars: sleep)
    monkeypatch.setattr(module, "_answers", lambda port: bool(brokers()))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "meta.properties").touch()
    yield module
    for left in brokers():
        left.kill()


@pytest.fixture
def restored_sigterm() -> Iterator[None]:
    """Ignored, where a program does not handle it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


def interrupted_once_it_runs(*args: object, **options: object) -> bool:
    if brokers():
        raise KeyboardInterrupt
    return False


def test_a_broker_whose_start_is_interrupted_is_gone(
    local_broker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_broker, "_answers", interrupted_once_it_runs)
    with pytest.raises(KeyboardInterrupt):
        local_broker.start(0, tmp_path)
    assert brokers() == []


@pytest.mark.usefixtures("restored_sigterm")
def test_sigterm_while_the_broker_starts_ends_both(
    local_broker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signalled_once_it_runs(port: int) -> bool:
        if brokers():
            os.kill(os.getpid(), signal.SIGTERM)
            return True
        return False

    monkeypatch.setattr(local_broker, "_answers", signalled_once_it_runs)
    monkeypatch.setattr(sys, "argv", ["local_broker.py", "--background", "--port=0", f"--data={tmp_path}"])
    assert local_broker.main() == 130
    assert brokers() == []


class Admin:
    """A cluster's rights, as KafkaAdminClient shows and changes them."""

    def __init__(self) -> None:
        self.granted: list[ACL] = []

    def alter_user_scram_credentials(self, changes: object) -> dict[str, None]:
        return {}

    def create_acls(self, rules: list[ACL]) -> dict[str, list[ACL]]:
        self.granted += [rule for rule in rules if rule not in self.granted]
        return {"failed": []}

    def describe_acls(self, asked: ACLFilter) -> tuple[list[ACL], type]:
        return [rule for rule in self.granted if rule.principal == asked.principal], NoError

    def delete_acls(self, rules: list[ACL]) -> None:
        self.granted = [rule for rule in self.granted if rule not in rules]

    def close(self) -> None:
        pass

    def topics(self) -> set[str]:
        return {rule.resource_pattern.resource_name for rule in self.granted}


@pytest.fixture
def grant(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("grant", GRANT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(assembly, "log_writer", lambda settings, topic: Admin())
    monkeypatch.setattr(module, "connection", lambda *args: nullcontext({}))
    return module


def granted(grant: ModuleType, monkeypatch: pytest.MonkeyPatch, admin: Admin, prefix: str) -> set[str]:
    """Grant what the table says for a prefix; return the names of its topics."""
    settings = config.load(None, {}, log={"url": "kafka://127.0.0.1:9", "topic_prefix": prefix})
    monkeypatch.setattr(grant, "KafkaAdminClient", lambda **options: admin)
    grant.grant(settings, dict.fromkeys(grant.rights(), "secret"))
    return set(settings.log.topics)


@pytest.mark.parametrize("prefix", ["omnidraft", "west", "eu.west"])
def test_rights_are_about_the_topics_that_the_settings_name(
    grant: ModuleType, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    admin = Admin()
    topics = granted(grant, monkeypatch, admin, prefix)
    assert admin.topics() == topics == {f"{prefix}.{name}.v1" for name in ("traces", "dead-letters", "snapshots")}
    rules = [(rule.principal, rule.operation.name) for rule in admin.granted if "traces" in str(rule)]
    assert ("User:omnidraft-worker", "WRITE") in rules
    assert ("User:omnidraft-worker", "READ") not in rules


def test_rights_of_other_prefixes_stay_and_all_that_the_table_does_not_name_go(
    grant: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = Admin()
    east = granted(grant, monkeypatch, admin, "omnidraft")
    topics = ["omnidraft.snapshots.v1", "west.snapshots.v1", "north.snapshots.v1", "other", "*"]
    surplus = [
        ACL("User:omnidraft-worker", "*", ACLOperation.WRITE, ACLPermissionType.ALLOW, ResourcePattern(kind, topic))
        for topic in topics
        for kind in (ResourceType.TOPIC, ResourceType.GROUP)
    ]
    strangers = ACL(
        "User:other", "*", ACLOperation.ALL, ACLPermissionType.ALLOW, ResourcePattern(ResourceType.TOPIC, topics[0])
    )
    admin.create_acls([*surplus, strangers])
    named = [rule for rule in admin.granted if rule not in surplus]
    west = granted(grant, monkeypatch, admin, "west")
    assert admin.topics() == east | west
    assert [rule for rule in admin.granted if rule in surplus] == []
    assert [rule for rule in named if rule not in admin.granted] == []
