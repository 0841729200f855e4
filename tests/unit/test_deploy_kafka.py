"""The start of a broker that is interrupted."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.kafka_fixture import load_local_broker

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
