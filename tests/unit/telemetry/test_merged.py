"""Scrapes of several workers as one: nothing is added up, every sample says whose it is."""

from prometheus_client.parser import text_string_to_metric_families

from omnidraft.telemetry.exposition import merged
from omnidraft.telemetry.metrics import PrometheusMetrics

COUNTER, HISTOGRAM = "omnidraft_requests_total", "omnidraft_time_to_first_token_seconds"


def scrape(num: int) -> str:
    metrics = PrometheusMetrics()
    metrics.add(COUNTER, num, status="ok", target="t")
    metrics.observe(HISTOGRAM, 0.03, target='odd "name"')
    return metrics.render().decode()


def test_every_sample_has_its_worker_and_its_value() -> None:
    text = merged("worker", [("one", scrape(1)), ("two", scrape(2))]).decode()
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


def test_without_workers_there_is_nothing() -> None:
    assert merged("worker", []) == b""
