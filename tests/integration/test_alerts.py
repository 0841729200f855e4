"""Every alert fires when its condition is planted, and stays silent beside it: promtool plays the series, a sample a
minute, in promtool's notation (`0+5x60` is 0, 5, 10, ..., 60 times)."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.dashboards import ALERTS, alerts
from tests.integration.prometheus_fixture import Prometheus
from tests.integration.prometheus_fixture import prometheus as prometheus

pytestmark = pytest.mark.long

W = 'job="omnidraft-worker", instance="w1"'
D = 'job="omnidraft-distiller", instance="d1", target="t"'
C = 'job="omnidraft-controller", instance="c1", target="t"'
V = f'{W}, target="t", drafter_version="3"'
PASSES = (f"omnidraft_target_passes_total{{{V}}}", "0+600x120")

Series = tuple[str, str]


@dataclass(frozen=True)
class Case:
    """Series that make an alert fire after so many minutes, and series that do not."""

    fires: tuple[Series, ...]
    silent: tuple[Series, ...]
    minutes: int = 60
    num_firing: int = 1


def one(name: str, labels: str, fires: str, silent: str, minutes: int = 60) -> Case:
    """One series decides."""
    series = f"{name}{{{labels}}}"
    return Case(((series, fires),), ((series, silent),), minutes)


def counted(name: str, labels: str) -> Case:
    """Stands still, then rises by one; stands still for good."""
    return one(name, labels, "0x50 1x20", "7x70")


def responses(code: str) -> Case:
    def at(path: str, its_code: str) -> str:
        return f'omnidraft_http_responses_total{{{W}, path="{path}", code="{its_code}"}}'

    good = (at("/v1/completions", "200"), "0+100x70")
    return Case(
        (good, (at("/v1/completions", code), "0+5x70")),
        (
            good,
            (at("/v1/completions", code), "0+0.5x70"),
            (at("/healthz", "200"), "0+9x70"),
            (at("other", "500"), "0+9x70"),  # an operator's orders on the page
        ),
    )


def agreement(last_half_hour: int) -> Case:
    """A day and an hour at 60 % agreement, then this much, of 100 positions a minute."""
    labels = f'{V}, source="direct", position="0"'
    total = (f"omnidraft_scored_positions_total{{{labels}}}", "0+100x1560")
    agreed = f"omnidraft_agreed_positions_total{{{labels}}}"
    steady, fell = f"0+60x1500 {90_000}+{last_half_hour}x60", "0+60x1560"
    return Case((total, (agreed, steady)), (total, (agreed, fell)), minutes=1556)


DRAFTED = f'omnidraft_spec_decode_num_draft_tokens_total{{{V}, source="direct"}}'
PLAIN, SPENT = f"omnidraft_plain_decode_seconds_total{{{V}}}", f'omnidraft_decode_seconds_total{{{V}, part="target"}}'
EMITTED, ACKNOWLEDGED = f"omnidraft_traces_emitted_total{{{W}}}", f"omnidraft_traces_acknowledged_total{{{W}}}"
DROPPED = f'omnidraft_traces_dropped_total{{{W}, reason="queue_full"}}'
LAG, STEPS = f'omnidraft_log_lag_records{{{D}, partition="0"}}', f"omnidraft_training_steps_total{{{D}}}"
SERVED = f'omnidraft_snapshot_version_info{{{W}, target="t", drafter="d"}}'
CHAMPION = f"omnidraft_champion_version_info{{{C}}}"
REFUSED, PROMOTED = f"omnidraft_refusals_total{{{C}}}", f"omnidraft_promotions_total{{{C}}}"

EXPIRED = f'{D}, reason="expired"'

CASES = {
    "OmnidraftLearningStandsStill": one("omnidraft_learner_blocked_info", D, "0x50 1x20", "0x70"),
    "OmnidraftTracesExpired": counted("omnidraft_traces_skipped_total", EXPIRED),
    "OmnidraftWorkerDown": one("up", W, "1x50 0x20", "1x70"),
    "OmnidraftNoWorker": one("up", W, "0x70", "1x70"),
    "OmnidraftErrors": responses("500"),
    "OmnidraftQueueFull": responses("429"),
    "OmnidraftSpeculationOff": Case((PASSES, (DRAFTED, "50x70")), (PASSES, (DRAFTED, "0+900x70"))),
    "OmnidraftSpeculationLosing": Case(
        ((PLAIN, "0+50x70"), (SPENT, "0+60x70")), ((PLAIN, "0+59x70"), (SPENT, "0+60x70"))
    ),
    "OmnidraftAgreementFell": agreement(40),
    "OmnidraftTracesNotAcknowledged": Case(
        ((EMITTED, "0+9x70"), (ACKNOWLEDGED, "0+9x40 360x30"), (DROPPED, "0x70")),
        ((EMITTED, "0+9x70"), (ACKNOWLEDGED, "0+8x70"), (DROPPED, "0x70")),
    ),
    "OmnidraftTracesDropped": Case(
        ((DROPPED, "0x50 3x20"),), ((DROPPED, "3x70"), (DROPPED.replace("queue_full", "redacted"), "0+5x70"))
    ),
    "OmnidraftDeadLetters": Case(
        ((f'omnidraft_traces_skipped_total{{{D}, reason="unknown_key"}}', "0x50 1x20"),),
        (
            (f'omnidraft_traces_skipped_total{{{D}, reason="unknown_key"}}', "4x70"),
            (f'omnidraft_traces_skipped_total{{{D}, reason="other_pair"}}', "0+9x70"),
        ),
    ),
    "OmnidraftBrokerOrRegistryUnreachable": one("omnidraft_learner_errors_total", D, "0+2x70", "0x50 1x20"),
    "OmnidraftSpansLost": one("omnidraft_spans_exported_total", f'{W}, result="failed"', "0+9x70", "9x70"),
    "OmnidraftDistillerDown": one("up", 'job="omnidraft-distiller", instance="d1"', "1x30 0x40", "1x30 0x2 1x40"),
    "OmnidraftControllerDown": one("up", 'job="omnidraft-controller", instance="c1"', "1x30 0x40", "1x30 0x2 1x40"),
    "OmnidraftLearnerLags": one("omnidraft_log_lag_records", f'{D}, partition="0"', "0+1000x70", "19000x70"),
    "OmnidraftLearnerStalled": Case(((LAG, "0+10x70"), (STEPS, "9x70")), ((LAG, "0+10x70"), (STEPS, "0+1x70"))),
    "OmnidraftSnapshotRefused": counted("omnidraft_snapshot_load_failures_total", f'{W}, target="t"'),
    "OmnidraftChallengersRefused": Case(
        ((REFUSED, "0x5 1x5 2x5 3x5 4x5 6x40"), (PROMOTED, "3x70")), ((REFUSED, "0+1x70"), (PROMOTED, "3x30 4x40"))
    ),
    "OmnidraftRolledBack": counted("omnidraft_rollbacks_total", C),
    "OmnidraftDrift": counted("omnidraft_drift_alarms_total", C),
    "OmnidraftWorkerBehindChampion": Case(
        ((SERVED, "3x70"), (CHAMPION, "3x40 4x30")), ((SERVED, "3x50 4x20"), (CHAMPION, "3x48 4x22"))
    ),
}


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == set(alerts())


def test_promtool_takes_the_rules_and_the_configuration(prometheus: Prometheus) -> None:
    for kind, path in (("rules", ALERTS), ("config", ALERTS.with_name("prometheus.yml"))):
        checked = prometheus.tool("check", kind, path)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_for_its_condition_and_for_nothing_beside_it(
    name: str, prometheus: Prometheus, tmp_path: Path
) -> None:
    case = CASES[name]
    written = tmp_path / "test.yml"
    tests = [_played(name, case.fires, case.minutes, 1), _played(name, case.silent, case.minutes, 0)]
    written.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    tested = prometheus.tool("test", "rules", written)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def _played(name: str, series: tuple[Series, ...], minutes: int, num_firing: int) -> dict[str, object]:
    expr = f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)'
    expected = {"expr": expr, "eval_time": f"{minutes}m", "exp_samples": [{"labels": "{}", "value": num_firing}]}
    return {
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in series],
        "promql_expr_test": [expected],
    }
