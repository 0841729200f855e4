"""What both kinds of metrics promise, and what a scrape shows."""

import logging
import re

import pytest

from omnidraft.telemetry.metrics import TABLE, CountingMetrics, PrometheusMetrics


@pytest.mark.parametrize("name", TABLE)
def test_a_name_says_what_it_counts_in(name):
    endings = {"counter": ("_total",), "gauge": ("_ratio", "_records", "_info", "_loss", "_waiting")}
    ends = endings.get(TABLE[name].kind, ("_seconds", "_pass", "_ratio"))
    assert re.fullmatch(r"omnidraft_[a-z_]+", name)
    assert name.endswith(ends)
    assert TABLE[name].help.endswith(".")


def test_a_scrape_shows_counters_gauges_and_histograms():
    metrics = PrometheusMetrics()
    metrics.add("omnidraft_traces_emitted_total")
    metrics.add("omnidraft_traces_dropped_total", 2, reason="queue_full")
    metrics.set("omnidraft_log_lag_records", 7, partition="0")
    metrics.observe("omnidraft_snapshot_swap_seconds", 0.04)
    scraped = metrics.render().decode()
    assert "omnidraft_traces_emitted_total 1.0" in scraped
    assert 'omnidraft_traces_dropped_total{reason="queue_full"} 2.0' in scraped
    assert 'omnidraft_log_lag_records{partition="0"} 7.0' in scraped
    assert 'omnidraft_snapshot_swap_seconds_bucket{le="0.05"} 1.0' in scraped
    assert "# HELP omnidraft_traces_emitted_total Trace records handed to the recorder." in scraped


def test_two_registries_do_not_share_anything():
    one, two = PrometheusMetrics(), PrometheusMetrics()
    one.add("omnidraft_rollbacks_total")
    assert "omnidraft_rollbacks_total 0.0" in two.render().decode()


def test_a_mistaken_name_label_or_kind_is_logged_and_never_raises(caplog):
    metrics = PrometheusMetrics()
    with caplog.at_level(logging.WARNING):
        metrics.add("omnidraft_no_such_thing_total")
        metrics.add("omnidraft_traces_dropped_total", why="queue_full")
        metrics.observe("omnidraft_rollbacks_total", 1.0)
        metrics.add("omnidraft_rollbacks_total", -1)
    assert len(caplog.records) == 3
    assert "omnidraft_rollbacks_total 0.0" in metrics.render().decode()


def test_counting_metrics_add_up_over_labels_that_are_not_asked_for():
    metrics = CountingMetrics()
    metrics.add("n_total", 2, reason="a")
    metrics.add("n_total", 3, reason="b")
    assert (metrics.value("n_total"), metrics.value("n_total", reason="b"), metrics.value("other")) == (5, 3, 0)


def test_counting_metrics_keep_gauges_and_distributions():
    metrics = CountingMetrics()
    metrics.set("lag", 4, partition="1")
    metrics.set("lag", 2, partition="1")
    metrics.observe("seconds", 0.5)
    metrics.observe("seconds", 0.25)
    assert metrics.value("lag", partition="1") == 2
    assert metrics.observed("seconds") == (0.5, 0.25)
