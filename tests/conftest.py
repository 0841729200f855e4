"""Fixtures that every test may use: a Kafka broker, MLflow on PostgreSQL, tiny models, a home for caches."""

import gc
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnidraft.errors import KernelsUnavailable
from omnidraft.models.probe import choice
from omnidraft.testing.tiny_models import make_drafter, make_target
from tests.homes import make_home
from tests.kafka_fixture import kafka_bootstrap as kafka_bootstrap
from tests.orphans import end_orphans, name_run
from tests.postgres_fixture import postgres as postgres
from tests.postgres_fixture import postgres_mlflow_url as postgres_mlflow_url
from tests.tiny_pair import Pair, make_pair

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A test process that crashes costs one test."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.xdist_scheduling import SurvivingScheduling

    return SurvivingScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """What is started from now on is known to be of this run, and no example fails for being slow."""
    name_run(config)
    if config.pluginmanager.hasplugin("hypothesispytest"):  # it is not installed beside vLLM
        from hypothesis import settings

        settings.register_profile("ours", deadline=None, print_blob=True)
        settings.load_profile("ours")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No cycles are looked for among what is collected, neither now, which takes 7 s of 16 s, nor later."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_unconfigure(config: pytest.Config) -> None:
    """No broker, server or helper outlives the tests, not even those of a test process that crashed."""
    end_orphans(config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Tests of our kernels are skipped where nothing compiles them; OMNIDRAFT_REQUIRE_COMPILER makes them fail."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, KernelsUnavailable) and not _may_compile():
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {call.excinfo.value}")
    return report


def _may_compile() -> bool:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    return "OMNIDRAFT_REQUIRE_COMPILER" in os.environ or any(map(shutil.which, names))


@pytest.fixture(scope="session", autouse=True)
def _products_that_this_processor_survives() -> None:
    """Before the first test multiplies anything: tests do not always load models where the product asks."""
    choice.torch_products()


@pytest.fixture(scope="session", autouse=True)
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """No test takes the power away; those of what has to be on the disk watch the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny target and of a tiny drafter with another vocabulary."""
    root = tmp_path_factory.mktemp("models")
    return make_target(root / "target"), make_drafter(root / "drafter")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A vocabulary pair with a drafter that can learn."""
    return make_pair(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def omnidraft_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models and alignments are cached in tests."""
    return make_home(tmp_path_factory.mktemp("home"))


class _Heard(logging.Handler):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def _drafting_does_not_fail(request: pytest.FixtureRequest) -> Iterator[None]:
    """A failure of drafting changes no text, so no test would see it: it fails here, unless the test is about it."""
    logger, heard = logging.getLogger("omnidraft.decode.drafting.safe_drafting"), _Heard()
    logger.addHandler(heard)
    yield
    logger.removeHandler(heard)
    if request.node.get_closest_marker("drafting_fails") is None:
        assert not heard.records, [str(record.exc_info and record.exc_info[1]) for record in heard.records]
