"""The image built and docker-compose.yml up, from the first start to the last stop; each test goes on where the one
before it ended. `make test-containers`."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator

import httpx
import pytest

from tests.containers.fleet import IMAGE, PROJECT, SERVICES, Fleet, build_image, docker, require_engine, told
from tests.soak.acknowledged import AckMonitor
from tests.soak.load_clients import PROMPTS, Tally, load
from tests.soak.verdict import BASE

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]

OURS = ("distiller", "controller", "worker")
KILLED_BY_FORCE = 137


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    require_engine()
    print(f"stand-ins: {build_image()}")
    started = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        began = time.monotonic()
        told(started.compose("up", "--detach"))
        started.wait_until_healthy()
        print(f"healthy after {time.monotonic() - began:.0f} s")
        yield started
    finally:
        started.remove()


def answers(fleet: Fleet, seconds: float) -> Tally:
    """Every request of two clients within these seconds, and until all records are acknowledged, is answered."""
    acks = AckMonitor(fleet.url)
    acks.start()
    with load(fleet.url, acks, num_clients=2, pause_s=0.2, max_tokens=24) as tally:
        time.sleep(seconds)
    settled(fleet, acks)
    acks.stop()
    assert tally.failures == []
    return tally


def settled(fleet: Fleet, acks: AckMonitor) -> None:
    def is_settled() -> bool:
        counts = acks.poll()
        return counts is not None and counts["acknowledged"] == counts["emitted"]

    fleet.wait_for(is_settled, lambda: f"records are not acknowledged: {acks.poll()}")


def recorded(fleet: Fleet) -> set[str]:
    """The ids of all requests in Kafka."""
    lines = told(fleet.operator("omnidraft", "traces", "tail", "-n", "100000")).splitlines()
    return {json.loads(line)["request_id"] for line in lines}


def learned(fleet: Fleet) -> list[dict]:
    """The versions that learned from records, the newest last."""
    versions = json.loads(told(fleet.operator("omnidraft", "snapshots", "list", "--json")))
    return sorted((each for each in versions if each["manifest"]["num_records"]), key=lambda each: each["version"])


def assert_nothing_is_lost(fleet: Fleet) -> None:
    assert ": 0 lost, 0 learned twice, 0 miscounted" in told(fleet.operator("omnidraft", "traces", "verify"))


def query(fleet: Fleet, path: str, **parameters: str) -> dict:
    """What Prometheus answers."""
    url = f"{fleet.address('prometheus', 9090)}/api/v1/{path}"
    return httpx.get(url, params=parameters, timeout=60).raise_for_status().json()["data"]


def targets_up(fleet: Fleet) -> dict[str, int]:
    """Number of targets of each job that are up."""
    up: dict[str, int] = defaultdict(int)
    for target in query(fleet, "targets")["activeTargets"]:
        up[target["labels"]["job"]] += target["health"] == "up"
    return up


def test_the_image_has_no_compiler_no_root_and_no_secret(fleet):
    look = "id -u; command -v g++ gcc uv | wc -l; find / -xdev -name .netrc -o -xdev -name '.env' 2>/dev/null | wc -l"
    assert told(docker("run", "--rm", IMAGE, "bash", "-c", look)).split() == ["10001", "1", "0"]
    assert told(docker("run", "--rm", IMAGE, "omnidraft", "--help"))


def test_an_answer_becomes_a_record_under_the_workers_own_login(fleet):
    tally = answers(fleet, 20)
    assert {answer.request_id for _, answer in tally.replies} == recorded(fleet)
    reads = fleet.compose("exec", "-T", "worker", "omnidraft", "traces", "tail", "--config", "/app/settings.toml")
    assert reads.returncode != 0
    assert "TopicAuthorizationFailed" in reads.stderr


def test_a_snapshot_is_learned_versioned_on_postgresql_and_served(fleet):
    def is_served() -> bool:
        served = {answer.snapshot_id for _, answer in answers(fleet, 5).replies}
        return any(each["manifest"]["snapshot_id"] in served for each in learned(fleet))

    fleet.wait_for(is_served, lambda: f"not served: {learned(fleet)}")
    sql = "select (select count(*) from model_versions), (select count(*) from registered_model_aliases)"
    rows = told(fleet.compose("exec", "-T", "postgres", "psql", "--username=mlflow", "-Atc", sql)).splitlines()
    num_versions, num_aliases = map(int, rows[0].split("|"))
    assert num_versions > 1
    assert num_aliases >= 1
    assert_nothing_is_lost(fleet)


def test_prometheus_has_all_targets_and_rules_and_the_first_start_paged_nobody(fleet):
    jobs = {"omnidraft-worker": 1, "omnidraft-distiller": 1, "omnidraft-controller": 1}
    fleet.wait_for(lambda: targets_up(fleet) == jobs, lambda: f"targets: {targets_up(fleet)}")
    rules = [rule for group in query(fleet, "rules")["groups"] for rule in group["rules"]]
    assert rules
    assert {rule["health"] for rule in rules} == {"ok"}
    fired = query(fleet, "query", query='max_over_time(ALERTS{alertname="OmnidraftNoWorker", alertstate="firing"}[1h])')
    assert fired["result"] == []


def test_two_workers_serve_the_champion(fleet):
    ports = f"{fleet.port}-{fleet.port + 1}"
    told(fleet.compose("up", "--detach", "--no-recreate", "--scale", "worker=2", "worker", ports=ports))
    fleet.wait_until_healthy()
    fleet.wait_for(lambda: targets_up(fleet)["omnidraft-worker"] == 2, lambda: f"targets: {targets_up(fleet)}")
    body = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
    said = [
        httpx.post(f"{fleet.address('worker', 8000, index)}/v1/completions", json=body, timeout=60).json()
        for index in (1, 2)
    ]
    assert said[0]["choices"][0]["text"] == said[1]["choices"][0]["text"]
    assert BASE not in {each["system_fingerprint"].partition("/")[0] for each in said}
    told(fleet.compose("up", "--detach", "--no-recreate", "--scale", "worker=1", "worker", ports=ports))


def test_a_kill_of_any_container_loses_no_request_and_no_record(fleet):
    acks = AckMonitor(fleet.url)
    acks.start()
    took = {}
    with load(fleet.url, acks, num_clients=2, pause_s=0.2, max_tokens=24) as tally:
        for service in SERVICES:
            began = time.monotonic()
            if service == "worker":
                with acks.worker_dies():
                    fleet.kill(service)
            else:
                fleet.kill(service)
            fleet.wait_until_healthy()
            took[service] = round(time.monotonic() - began)
            time.sleep(5)
    settled(fleet, acks)
    acks.stop()
    print(f"seconds from kill to healthy: {took}")
    assert tally.failures == []
    texts = defaultdict(set)
    for prompt, answer in tally.replies:
        texts[prompt].add(answer.text)
    assert {len(each) for each in texts.values()} == {1}
    in_log = recorded(fleet)
    assert acks.acknowledged - in_log == set()
    print(f"{len(tally.replies)} answers, {len(acks.acknowledged)} known to be acknowledged, {len(in_log)} in Kafka")
    assert_nothing_is_lost(fleet)


def test_down_and_up_keep_everything_and_every_stop_is_in_time(fleet):
    before, version = recorded(fleet), learned(fleet)[-1]["version"]
    began = time.monotonic()
    told(fleet.compose("stop"))
    took_s = time.monotonic() - began
    print(f"stopped after {took_s:.0f} s")
    codes = {
        each["Config"]["Labels"]["com.docker.compose.service"]: each["State"]["ExitCode"] for each in fleet.containers()
    }
    assert {service: codes[service] for service in OURS} == dict.fromkeys(OURS, 0)
    assert KILLED_BY_FORCE not in codes.values()
    told(fleet.compose("down"))
    assert told(docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}")) == ""
    told(fleet.compose("up", "--detach"))
    fleet.wait_until_healthy()
    tally = answers(fleet, 20)
    assert recorded(fleet) == before | {answer.request_id for _, answer in tally.replies}
    assert {answer.snapshot_id for _, answer in tally.replies}.isdisjoint({BASE})
    fleet.wait_for(lambda: learned(fleet)[-1]["version"] > version, lambda: f"nothing was learned after {version}")
    assert_nothing_is_lost(fleet)
