"""Rounds against a fleet of real processes under load: what its log, its registry and its snapshots are made to be.

In each round and after it every request is answered with plain decoding's text, and in the end what was learned since
serves on every worker. Rounds that come at any moment, and what they do to records: `tests/soak/faults.py`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import mlflow
import pytest
import torch
from kafka import KafkaAdminClient

from omnidraft import assembly
from omnidraft.fleet.control_log import ControlLog
from omnidraft.ports import Registry, Restart
from omnidraft.registry.manifest_export import pair_name
from omnidraft.snapshots import bundle
from tests.kafka_fixture import require_jars
from tests.soak.acknowledged import AckMonitor
from tests.soak.cluster import Cluster, tiny_settings
from tests.soak.faults import MAX_TOKENS, plain_texts
from tests.soak.load_clients import Tally, load

pytestmark = [pytest.mark.kafka, pytest.mark.long, pytest.mark.timeout(900)]
PATIENCE_S = 400.0
CALM_S = 3.0


class Fleet:
    """What runs, and what clients of each worker got."""

    def __init__(self, cluster: Cluster, tallies: dict[str, Tally], plain: list[str]) -> None:
        self.cluster, self.settings, self._tallies, self._plain = cluster, cluster.settings, tallies, plain
        self.control: ControlLog = assembly.ordering_log(self.settings)
        self.ended: list[tuple[str, int, str]] = []
        cluster.on_end = lambda *ended: self.ended.append(ended)

    @property
    def registry(self) -> Registry:
        return assembly.registry(self.settings)

    @property
    def name(self) -> str:
        """The registered model's."""
        return pair_name(self.settings.models.drafter, self.settings.models.target)

    def wait_for(self, reached: Callable[[], object], what: str) -> None:
        self.cluster.wait_for(lambda: bool(reached()), what, PATIENCE_S)

    def served(self) -> dict[str, set[str]]:
        """Worker -> the snapshots that it has answered with so far."""
        return {name: {reply.snapshot_id for _, reply in tally.replies} for name, tally in self._tallies.items()}

    def go_on(self, seconds: float = CALM_S) -> None:
        self.cluster.supervise(seconds)

    def check(self) -> None:
        """What is learned from now on serves on every worker; nothing that was asked was answered wrongly."""
        before = self.served()
        self.wait_for(lambda: all(now - before[name] for name, now in self.served().items()), "new champion")
        for tally in self._tallies.values():
            assert tally.failures == []
            assert [reply for prompt, reply in tally.replies if reply.text != self._plain[prompt]] == []
        assert self.ended == []

    def order_newest(self) -> None:
        """As an operator orders it."""
        newest = max(each.version for each in self.registry.versions() if each.is_servable)
        assert assembly.order_champion(self.settings, self.control, newest) is not None
        self.go_on()

    def delete(self, topic: str) -> None:
        with closing(KafkaAdminClient(bootstrap_servers=self.settings.log.url.removeprefix("kafka://"))) as admin:
            admin.delete_topics([topic])

    def publish(self, change: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """Publish the newest snapshot with other weights, as who holds the distiller's key may; return its version."""
        newest, folder = self.registry.resolve("latest"), self.cluster.folder / f"forged-{time.monotonic_ns()}"
        fetched = self.registry.fetch(newest.version, folder / "fetched", ("serving", "resume"))
        names = [name for name in newest.manifest.sha256 if not name.startswith("memory")]
        parts = {name: fetched / name for name in names}
        parts[bundle.DRAFTER] = {name: change(each) for name, each in bundle.tensors(fetched, bundle.DRAFTER).items()}
        of = {"snapshot_id": folder.name, "parent_id": newest.manifest.snapshot_id, "signatures": {}}
        bundle.write(folder / folder.name, newest.manifest.model_copy(update=of), parts)
        return self.registry.publish(folder / folder.name, newest.version).version


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, omnidraft_home: Path) -> Iterator[Fleet]:
    require_jars()
    folder = tmp_path_factory.mktemp("rounds")
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        environ = {"OMNIDRAFT_LEARNER__HOST": "process"}
        cluster = stack.enter_context(Cluster(folder / "fleet", tiny_settings(folder / "models"), **environ))
        plain = plain_texts(cluster.settings)
        cluster.start_all()
        asking = {
            name: load(url, AckMonitor(url), num_clients=1, pause_s=0.5, max_tokens=MAX_TOKENS)
            for name, url in cluster.urls.items()
        }
        made = Fleet(cluster, {name: stack.enter_context(each) for name, each in asking.items()}, plain)
        made.check()
        yield made


def delete_the_trace_topic(fleet: Fleet) -> None:
    """The learner waits until an operator says where it goes on."""
    fleet.delete(fleet.settings.log.traces_topic)
    fleet.go_on(10.0)
    fleet.control.put(("restart",), Restart(start="earliest", id="deleted"))


def delete_the_control_topic(fleet: Fleet) -> None:
    """Its keeper, the controller, makes it anew."""
    fleet.delete(fleet.settings.log.control_topic)
    fleet.go_on()


def delete_the_champion(fleet: Fleet) -> None:
    """Nothing is promoted before an operator names another one, and learning goes back to that: what it learned since
    cannot be compared with it."""
    champion = fleet.registry.resolve("champion").version
    mlflow.MlflowClient(fleet.cluster.registry_url).delete_model_version(fleet.name, str(champion))
    fleet.go_on()
    fleet.order_newest()


def delete_all_versions(fleet: Fleet) -> None:
    """Learning goes on from its weights, and publishes anew; nothing is promoted before an operator names a version."""
    mlflow.MlflowClient(fleet.cluster.registry_url).delete_registered_model(fleet.name)
    fleet.wait_for(fleet.registry.versions, "new version")
    fleet.order_newest()


def publish_weights(change: Callable[[torch.Tensor], torch.Tensor], fleet: Fleet) -> None:
    """Whoever serves them drafts badly or not at all; the operator goes back, and learning with him."""
    fleet.wait_for(lambda: any(each.manifest.train != "base" for each in fleet.registry.versions()), "learned snapshot")
    fleet.cluster.stop("distiller")
    good = fleet.registry.resolve("latest").version
    bad = fleet.publish(change)
    assembly.order_champion(fleet.settings, fleet.control, bad)
    fleet.go_on()
    assembly.order_champion(fleet.settings, fleet.control, good)
    fleet.go_on()
    fleet.cluster.bring_up("distiller")


ROUNDS: dict[str, Callable[[Fleet], None]] = {
    "trace topic deleted": delete_the_trace_topic,
    "control topic deleted": delete_the_control_topic,
    "champion deleted": delete_the_champion,
    "weights of NaN": partial(publish_weights, lambda weights: torch.full_like(weights, torch.nan)),
    "weights of infinity": partial(publish_weights, lambda weights: torch.full_like(weights, torch.inf)),
    "weights of another shape": partial(publish_weights, lambda weights: weights[:-1].contiguous()),
    "all versions deleted": delete_all_versions,
}


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round(fleet: Fleet, name: str) -> None:
    ROUNDS[name](fleet)
    fleet.check()
