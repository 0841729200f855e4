"""The broker that Kafka tests run against: a given one, else one of our own, else a skip that says why.

OMNIDRAFT_TEST_KAFKA=host:port names a running broker; OMNIDRAFT_REQUIRE_KAFKA=1 turns the skip into a failure.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

LOCAL_BROKER = Path(__file__).parents[1] / "deploy" / "kafka" / "local_broker.py"


def load_local_broker() -> ModuleType:
    """Import deploy/kafka/local_broker.py, which is a program and not part of a package."""
    name = "omnidraft_local_broker"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, LOCAL_BROKER)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def skip_without_kafka(why: str) -> None:
    """Never returns."""
    if os.environ.get("OMNIDRAFT_REQUIRE_KAFKA") == "1":
        pytest.fail(f"OMNIDRAFT_REQUIRE_KAFKA=1, but {why}")
    pytest.skip(why)


def require_jars() -> None:
    """A broker can be started here. Skips, or fails, where it cannot."""
    local_broker = load_local_broker()
    try:
        local_broker.fetch_jars()
    except local_broker.BrokerError as exc:
        skip_without_kafka(f"no Kafka broker: {exc}")


@pytest.fixture(scope="session")
def kafka_bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a broker."""
    if given := os.environ.get("OMNIDRAFT_TEST_KAFKA"):
        yield given
        return
    local_broker = load_local_broker()
    try:
        data = Path(os.path.relpath(tmp_path_factory.mktemp("kafka")))  # as `make kafka` gives it
        broker = local_broker.start(0, data)
    except local_broker.BrokerError as exc:
        skip_without_kafka(f"no Kafka broker: {exc}")
    yield broker.bootstrap
    broker.kill()  # its data is thrown away
