"""Metrics in a Prometheus registry, in memory and with fixed labels, and the text of a scrape."""

import logging
import re

import pytest

from omnidraft.ports import SKIP_REASONS
from omnidraft.telemetry.metric_definitions import COMMON, CONTROLLER, DEFINITIONS, DISTILLER, WORKER
from omnidraft.telemetry.metrics import MAX_VERSIONS, CountingMetrics, LabelledMetrics, PrometheusMetrics


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_name_says_what_it_counts_in(name):
    endings = {
        "counter": ("_total",),
        "gauge": (
            "_ratio",
            "_records",
            "_info",
            "_loss",
            "_waiting",
            "_running",
            "_texts",
            "_ids",
            "_tokens",
            "_tenants",
        ),
    }
    ends = endings.get(DEFINITIONS[name].kind, ("_seconds", "_pass", "_ratio"))
    assert re.fullmatch(r"omnidraft_[a-z_]+", name)
    assert name.endswith(ends)
    assert DEFINITIONS[name].help.endswith(".")


def test_a_scrape_shows_counters_gauges_and_histograms():
    metrics = PrometheusMetrics()
    metrics.add("omnidraft_traces_emitted_total")
    metrics.add("omnidraft_traces_dropped_total", 2, reason="queue_full")
    metrics.set("omnidraft_log_lag_records", 7, partition="0", target="t")
    metrics.observe("omnidraft_snapshot_swap_seconds", 0.04, target="t")
    scraped = metrics.render().decode()
    assert "omnidraft_traces_emitted_total 1.0" in scraped
    assert 'omnidraft_traces_dropped_total{reason="queue_full"} 2.0' in scraped
    assert 'omnidraft_log_lag_records{partition="0",target="t"} 7.0' in scraped
    assert 'omnidraft_snapshot_swap_seconds_bucket{le="0.05",target="t"} 1.0' in scraped
    assert "# HELP omnidraft_traces_emitted_total Trace records handed to the recorder." in scraped


def test_a_mistaken_name_label_or_kind_is_logged_and_never_raises(caplog):
    metrics = PrometheusMetrics()
    with caplog.at_level(logging.WARNING):
        metrics.add("omnidraft_no_such_thing_total")
        metrics.add("omnidraft_traces_dropped_total", why="queue_full")
        metrics.observe("omnidraft_traces_emitted_total", 1.0)
        metrics.add("omnidraft_traces_emitted_total", -1)
    assert len(caplog.records) == 3
    assert "omnidraft_traces_emitted_total 0.0" in metrics.render().decode()


def test_counting_metrics_add_up_over_labels_that_are_left_out():
    metrics = CountingMetrics()
    metrics.add("n_total", 2, reason="a")
    metrics.add("n_total", 3, reason="b")
    assert (metrics.value("n_total"), metrics.value("n_total", reason="b"), metrics.value("other")) == (5, 3, 0)


def test_series_with_known_labels_begin_at_zero_so_that_the_first_event_is_an_increase():
    scraped = PrometheusMetrics(DISTILLER, ["t"]).render().decode()
    assert 'omnidraft_training_steps_total{target="t"} 0.0' in scraped
    for reason in SKIP_REASONS:
        assert f'omnidraft_traces_skipped_total{{reason="{reason}",target="t"}} 0.0' in scraped
    assert 'drafter_version="' not in scraped


def test_a_process_shows_the_metrics_of_its_role_and_itself():
    names = {name for name in DEFINITIONS if f"# HELP {name.removesuffix('_total')}" in _scraped(CONTROLLER)}
    assert names == {*CONTROLLER, *COMMON}
    assert not set(WORKER) & set(DISTILLER) | set(WORKER) & set(CONTROLLER) | set(DISTILLER) & set(CONTROLLER)
    assert "process_resident_memory_bytes" in _scraped(WORKER)
    assert "omnidraft_build_info{version=" in _scraped(WORKER)


def _scraped(role):
    return PrometheusMetrics(role, ["t"]).render().decode()


def test_series_of_old_drafters_do_not_pile_up():
    metrics = PrometheusMetrics(WORKER)
    for version in range(1000):
        metrics.add("omnidraft_target_passes_total", target="t", drafter_version=str(version))
        metrics.observe("omnidraft_spec_decode_accepted_tokens_per_pass", 1, target="t", drafter_version=str(version))
    shown = set(re.findall(r'passes_total{drafter_version="(\d+)"', metrics.render().decode()))
    assert shown == {str(version) for version in range(1000 - MAX_VERSIONS, 1000)}
    assert len(metrics.render()) < 100_000


def test_counting_metrics_forget_the_series_of_old_drafters_and_no_others():
    metrics = CountingMetrics()
    metrics.add("n_total", target="t")
    for version in map(str, range(100)):
        metrics.add("n_total", drafter_version=version)
        metrics.set("g_ratio", 0.5, drafter_version=version)
        metrics.observe("s_seconds", 0.25, drafter_version=version)
    assert metrics.value("n_total") == MAX_VERSIONS + 1
    assert metrics.value("g_ratio") == MAX_VERSIONS / 2
    assert metrics.observed("s_seconds") == (0.25,) * MAX_VERSIONS
    oldest_kept = 100 - MAX_VERSIONS
    kept, gone = (metrics.value("n_total", drafter_version=str(each)) for each in (oldest_kept, oldest_kept - 1))
    assert (kept, gone) == (1, 0)


def test_labels_that_are_given_once_are_on_every_name():
    metrics = CountingMetrics()
    part = LabelledMetrics(metrics, target="t")
    part.add("n_total", 2, reason="a")
    part.set("g", 3)
    part.observe("s", 0.5)
    assert metrics.value("n_total", target="t", reason="a") == 2
    assert (metrics.value("g", target="t"), metrics.observed("s", target="t")) == (3, (0.5,))
