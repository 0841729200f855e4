"""Dashboards and alerts are code: up to date, about metrics that exist, with advice that can be found."""

import re
import runpy

import pytest
import yaml

from omnidraft.telemetry.metric_definitions import DEFINITIONS, GENERATION_PATHS, TOKENIZATION_PATHS
from tests.dashboards import ALERTS, BOARDS, DEPLOY, alerts, metric_names, queries
from tests.doc_blocks import anchors

ROOT = DEPLOY.parent
LABELS_OF_PROMETHEUS = {"job", "instance", "le"}
UNSHOWN = {
    "omnidraft_build_info",  # for joins
    "omnidraft_spans_ended_total",
    "omnidraft_spans_exported_total",  # an alert asks for it
    "omnidraft_spec_decode_accepted_tokens_per_pass",  # vLLM's dashboards ask for it
    "omnidraft_kept_records_dropped_total",  # a log line says as much
    "omnidraft_followed_texts",  # vLLM's, whose queue says as much
    "omnidraft_drafter_ids",
    "omnidraft_agreement_ratio",  # `omnidraft status` asks for it
}


def test_the_files_are_what_the_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEPLOY / "grafana"))
    files = runpy.run_path(str(DEPLOY / "grafana" / "make_dashboards.py"))["files"]()
    assert sorted(files) == BOARDS
    assert all(path.read_text() == text for path, text in files.items()), "run `make dashboards`"


@pytest.mark.parametrize(("where", "expr"), [*queries(), *((name, rule["expr"]) for name, rule in alerts().items())])
def test_a_query_asks_for_metrics_and_labels_that_there_are(where: str, expr: str) -> None:
    names = metric_names(expr)
    assert names <= set(DEFINITIONS)
    labels = {label for name in names for label in DEFINITIONS[name].labels} | LABELS_OF_PROMETHEUS
    if "process_" in expr:
        labels.add("target")  # the distiller adds it to what its learners say of themselves
    for kind in ("by", "on", "ignoring"):
        for asked in re.findall(rf"\b{kind} ?\(([^)]*)\)", expr):
            assert set(re.split(r", *", asked)) <= labels
    for selector in re.findall(r"{([^}]*)}", expr):
        assert set(re.findall(r"(\w+) *(?:=~|!~|!=|=)", selector)) <= labels


@pytest.mark.parametrize(("where", "expr"), list(queries()))
def test_a_legend_names_labels_that_the_query_keeps(where: str, expr: str) -> None:
    for label in re.findall(r"{{(\w+)}}", where):
        assert re.search(rf"by \([^)]*\b{label}\b", expr) or "sum" not in expr


def test_every_metric_is_shown() -> None:
    shown = set().union(*(metric_names(expr) for _, expr in queries()))
    assert set(DEFINITIONS) - shown == UNSHOWN


def test_the_duration_of_requests_is_that_of_all_that_generate_and_of_no_others() -> None:
    durations = [expr for where, expr in queries() if ": Duration of requests: " in where]
    assert durations
    for expr in durations:
        (paths,) = re.findall(r'path=~"([^"]*)"', expr)
        known = (*GENERATION_PATHS, *TOKENIZATION_PATHS)
        assert [path for path in known if re.fullmatch(paths, path)] == list(GENERATION_PATHS)


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_what_to_do_and_where_to_read_on(name: str) -> None:
    rule = alerts()[name]
    assert rule["labels"]["severity"] in ("page", "ticket")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    assert len(notes["description"]) > 60
    file, _, anchor = notes["runbook"].partition("#")
    assert anchor in anchors(ROOT / file)


def test_the_page_has_the_table_of_metrics() -> None:
    script = runpy.run_path(str(DEPLOY / "prometheus" / "metrics_table.py"))
    text = (ROOT / "docs" / "operate.md").read_text()
    assert script["page"](text) == text, "run `make dashboards`"


def test_provisioning_names_what_there_is() -> None:
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/omnidraft.yml").read_text())["providers"]
    assert provider["type"] == "file"
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert scraped["rule_files"] == [ALERTS.name]
    jobs = {each["job_name"] for each in scraped["scrape_configs"]}
    asked = set(re.findall(r'job="([\w-]+)"', ALERTS.read_text() + "".join(path.read_text() for path in BOARDS)))
    assert {job.replace("\\", "") for job in asked} <= jobs
