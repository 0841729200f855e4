"""The soak's other parts, small: broker and registry down for seconds, and records counted through a topic."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kafka_fixture import require_jars
from tests.soak import broker_down, orders, throughput
from tests.soak.cluster import BROKER, Cluster
from tests.soak.part import SoakPlan

pytestmark = [pytest.mark.kafka, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, omnidraft_home: Path) -> Iterator[SoakPlan]:
    """Tiny models and short outages."""
    require_jars()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        out, tiny = tmp_path_factory.mktemp("outages"), "tiny"
        yield SoakPlan(out, outage_s=2.0, hold_s=2.0, target=tiny, drafter=tiny, threads=1)


def test_while_the_broker_is_away_records_are_dropped_and_counted_and_sending_goes_on_afterwards(
    plan: SoakPlan,
) -> None:
    """Speeds are not judged here: two seconds of a tiny model say nothing."""
    result = broker_down.run(plan)
    figures = result.figures
    assert figures["acknowledged"] + figures["dropped"] == figures["emitted"]
    assert figures["dropped"] > 0
    assert figures["records_in_log"] >= figures["acknowledged"] > 0
    assert len(figures["recovered_s"]) == 2
    assert [window["kind"] for window in figures["windows"]].count("up") == 3
    others = [held for assertion, held in result.assertions.items() if "speed" not in assertion]
    assert others == [True, True]


def test_orders_are_followed_within_seconds_while_the_registry_is_stopped_and_the_next_champion_comes_afterwards(
    plan: SoakPlan,
) -> None:
    result = orders.run(plan)
    assert all(result.assertions.values()), result


def test_records_come_through_a_topic_whole_and_in_order_and_a_rate_that_is_not_reached_is_told(plan: SoakPlan) -> None:
    with Cluster(plan.out / "throughput", "[worker]") as cluster:
        cluster.bring_up(BROKER)
        servers = cluster.settings.log.url.removeprefix("kafka://")
        load = throughput.TopicLoad(servers, "load", size_bytes=2_000, per_s=200, seconds=2.0)
        rates = throughput.measure(load, cluster)
        assert (rates["read"], rates["out_of_order"], rates["is_sustained"]) == (400, 0, True)
        impossible = throughput.measure(replace(load, topic="much", per_s=500_000, seconds=0.06), cluster)
        assert (impossible["read"], impossible["is_sustained"]) == (30_000, False)
