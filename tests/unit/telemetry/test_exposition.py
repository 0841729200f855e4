"""Scrapes of processes that have no HTTP side of their own, and of several workers as one."""

import logging
import socket
from contextlib import closing

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from omnidraft.config import MetricsSettings
from omnidraft.telemetry.exposition import Exposition, MergedCollector, merge_scrapes
from omnidraft.telemetry.metric_definitions import DISTILLER
from omnidraft.telemetry.metrics import PrometheusMetrics

COUNTER, HISTOGRAM = "omnidraft_requests_total", "omnidraft_time_to_first_token_seconds"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(exposition: Exposition) -> str:
    return httpx.get(f"http://127.0.0.1:{exposition.port}/metrics").raise_for_status().text


def samples(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items())): one.value for each in families for one in each.samples}


def test_a_scrape_gets_what_is_counted_now() -> None:
    metrics = PrometheusMetrics(DISTILLER, ["t"])
    with closing(Exposition(metrics.registry, MetricsSettings(), 0)) as exposition:
        metrics.add("omnidraft_training_steps_total", 3, target="t")
        assert samples(scraped(exposition))["omnidraft_training_steps_total", frozenset({("target", "t")})] == 3


def test_a_name_that_is_not_allowed_gets_no_figures() -> None:
    with closing(Exposition(CollectorRegistry(), MetricsSettings(), 0, ["distiller"])) as exposition:
        url = f"http://127.0.0.1:{exposition.port}/metrics"
        hosts = ["evil.example:8001", "", "distiller:8001", "localhost", "10.0.0.7:8001", "[::1]:8001"]
        statuses = [httpx.get(url, headers={"Host": host}).status_code for host in hosts]
    assert statuses == [421, 421, 200, 200, 200, 200]


def test_learners_of_two_targets_are_one_scrape_and_nothing_is_lost() -> None:
    learners = {name: PrometheusMetrics(DISTILLER, [name]) for name in ("one", "other")}
    for number, (name, metrics) in enumerate(learners.items()):
        metrics.add("omnidraft_training_steps_total", 5 + number, target=name)
        metrics.observe("omnidraft_training_step_seconds", 0.3, target=name)
        metrics.set("omnidraft_training_loss", 1.5, target=name, loss="dm")
    registry = CollectorRegistry()
    registry.register(
        MergedCollector("target", lambda: [(name, each.render().decode()) for name, each in learners.items()])
    )
    with closing(Exposition(registry, MetricsSettings(), 0)) as exposition:
        text = scraped(exposition)
    scraped_samples = samples(text)
    for name, metrics in learners.items():
        for (sample, labels), value in samples(metrics.render().decode()).items():
            if sample.startswith("omnidraft_"):
                assert scraped_samples[sample, labels | {("target", name)}] == value
    assert text.count("# TYPE omnidraft_training_step_seconds ") == 1
    assert {
        dict(labels)["target"] for name, labels in scraped_samples if name == "process_resident_memory_bytes"
    } == set(learners)


def test_a_port_that_is_taken_is_logged_and_the_process_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            caplog.at_level(logging.WARNING),
            closing(Exposition(CollectorRegistry(), MetricsSettings(), port)) as exposition,
        ):
            assert exposition.port is None
    assert str(port) in caplog.text


def worker_scrape(num: int) -> str:
    metrics = PrometheusMetrics()
    metrics.add(COUNTER, num, status="ok", target="t")
    metrics.observe(HISTOGRAM, 0.03, target='odd "name"')
    return metrics.render().decode()


def test_every_sample_has_its_worker_and_its_value() -> None:
    text = merge_scrapes("worker", [("one", worker_scrape(1)), ("two", worker_scrape(2))]).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    counted = {
        each.labels["worker"]: each.value for each in families["omnidraft_requests"].samples if each.name == COUNTER
    }
    assert counted == {"one": 1, "two": 2}
    buckets = [each for each in families[HISTOGRAM].samples if each.name.endswith("_count")]
    assert {(each.labels["worker"], each.labels["target"], each.value) for each in buckets} == {
        ("one", 'odd "name"', 1),
        ("two", 'odd "name"', 1),
    }
    assert text.count(f"# TYPE {HISTOGRAM} histogram") == 1
