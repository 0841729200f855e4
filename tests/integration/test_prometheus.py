"""A real Prometheus scrapes a live worker, learner and controller: every query of the dashboards is answered, with data
where what it asks for happened, and the rules are evaluated."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from omnidraft import assembly
from omnidraft.ports import Outgoing
from tests.dashboards import ALERTS, alerts, queries
from tests.integration.prometheus_fixture import Prometheus
from tests.integration.prometheus_fixture import prometheus as prometheus
from tests.tiny_engine import PATIENCE_S
from tests.tiny_fleet import Fleet, fleet_settings, running_fleet

pytestmark = pytest.mark.long

SCRAPED_EVERY = "500ms"
NOTHING_HAPPENED = {
    "omnidraft-serving: drift",
    "omnidraft-learning: drift",
}
"""Queries that select what is above 0, of events that this fleet does not have."""


@dataclass
class Scraping:
    """A Prometheus that scrapes the fleet."""

    url: str
    fleet: Fleet

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def values(self, expr: str) -> list[float]:
        return [float(each["value"][1]) for each in self.ask("query", query=expr)["result"]]

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_there():
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.fixture(scope="module")
def scraping(
    prometheus: Prometheus,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_models: tuple[Path, Path],
    omnidraft_home: Path,
) -> Iterator[Scraping]:
    """Until two snapshots came, the second while Prometheus looked on, and a message was no record."""
    folder = tmp_path_factory.mktemp("scraped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        settings = fleet_settings(tiny_models, folder)
        with running_fleet(settings, folder) as fleet, _scraper(prometheus, folder, fleet) as url:
            made = Scraping(url, fleet)
            made.wait_for(lambda: made.values("count(up == 1)") == [3.0])
            assembly.log_writer(settings, settings.log.traces_topic).append([Outgoing(b"key", b"no record")])
            fleet.ask_until(lambda: _served(fleet) >= 3, 90)
            fleet.ask_until(lambda: made.values("max(omnidraft_snapshot_version_info)") >= [3.0], 30)
            deadline = time.monotonic() + 3  # several scrapes of all that moved
            fleet.ask_until(lambda: time.monotonic() > deadline, 30)
            yield made


def _served(fleet: Fleet) -> int:
    return fleet.worker.engine.slot.current.version or 0


@contextmanager
def _scraper(prometheus: Prometheus, folder: Path, fleet: Fleet) -> Iterator[str]:
    """deploy/prometheus/prometheus.yml with these addresses, and rules that do not wait."""
    config = yaml.safe_load(ALERTS.with_name("prometheus.yml").read_text())
    config["global"] = {"scrape_interval": SCRAPED_EVERY, "evaluation_interval": SCRAPED_EVERY}
    for job in config["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        job["static_configs"] = [{"targets": [f"127.0.0.1:{fleet.ports[job['job_name']]}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / ALERTS.name).write_text(re.sub(r"( +)for: \w+\n", "", ALERTS.read_text()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [prometheus.server, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        _wait_until_ready(f"http://{address}/-/ready", folder / "prometheus.log")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        shutil.rmtree(folder / "tsdb", ignore_errors=True)


def _wait_until_ready(url: str, log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=1.0).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.mark.timeout(300)
def test_every_query_of_the_dashboards_is_answered_with_data(scraping: Scraping) -> None:
    answers = {where: scraping.values(expr) for where, expr in queries()}
    without = {where for where, values in answers.items() if not values}
    assert without == NOTHING_HAPPENED
    assert len(answers) > 60


def test_the_rules_are_evaluated_and_a_dead_letter_is_told_in_words(scraping: Scraping) -> None:
    groups = scraping.ask("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(rules) == set(alerts())
    scraping.wait_for(lambda: all(rule["health"] == "ok" for rule in _rules(scraping)))
    scraping.wait_for(lambda: "OmnidraftWorkerDown" not in _told(scraping))  # rules do not wait here: one slow scrape
    told = _told(scraping)
    assert "became dead letters: unknown_schema" in told["OmnidraftDeadLetters"]["summary"]
    assert "<error" not in str(told)
    assert not {"OmnidraftErrors", "OmnidraftTracesDropped", "OmnidraftDrift"} & set(told)


def _rules(scraping: Scraping) -> list[dict[str, Any]]:
    return [rule for group in scraping.ask("rules")["groups"] for rule in group["rules"]]


def _told(scraping: Scraping) -> dict[str, dict[str, str]]:
    """Annotations of the alerts that fire."""
    return {each["labels"]["alertname"]: each["annotations"] for each in scraping.ask("alerts")["alerts"]}
