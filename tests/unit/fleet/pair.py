"""A pair for tests: a registry in folders, logs in memory, and one controller after another."""

import json
import uuid

from omnidraft.config import ControllerSettings
from omnidraft.fleet.control_log import ControlLog
from omnidraft.fleet.controller import Controller
from omnidraft.fleet.lease import ControllerLease
from omnidraft.fleet.request_stats import RequestStatsReader
from omnidraft.ports import Judgement, Order
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots.signing import UNSIGNED
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from tests.snapshot_folders import make_bundle, version_folder

TOLD = ("champion", "canary", "drift", "rewind")


class Pair:
    """Challengers are measured on held-out records alone, unless `settings` have a canary's share."""

    def __init__(self, folder, settings=None, registry=None):
        self.folder, self.settings, self.now = folder, settings or ControllerSettings(), 0.0
        self.registry = registry or self.open()
        self.log, self.metrics = MemoryLog(), CountingMetrics()
        self.traces, self.listener = MemoryWriter(self.log, "traces"), self.control()

    def open(self, kind=DirectoryRegistry):
        """The registry, as another process sees it."""
        return kind(self.folder / "registry", "org/small", "big", keep_resume=2)

    def control(self, reader=None, writer=None):
        reader, writer = reader or MemoryReader(self.log, "control"), writer or MemoryWriter(self.log, "control")
        return ControlLog(lambda: reader, lambda: writer, self.metrics, target="big", drafter="org/small")

    def controller(self, *, reader=None, writer=None, registry=None, signing=UNSIGNED, traffic=None):
        lease, options = ControllerLease(self.control(reader, writer)), {"target": "big", "signing": signing}
        traffic = traffic or RequestStatsReader(MemoryReader(self.log, "traces"), target="big", drafter="org/small")
        services = (registry or self.registry, lease, traffic, self.metrics, self.settings)
        return Controller(*services, clock=lambda: self.now, **options)

    def publish(self, snapshot_id, parent, before=None, after=None, **fields):
        parent_id = self.registry.resolve(str(parent)).manifest.snapshot_id if parent else None
        told = {"parent_id": parent_id, "agreement_before": before, "agreement_after": after, "held_out_records": 8}
        told |= {"agreement_change_error": 0.001, **fields}
        folder = make_bundle(self.folder / "bundles", snapshot_id, **told)
        return self.open().publish(folder, parent).version

    def order(self, version):
        """What an operator's command does."""
        self.control().put(("order", uuid.uuid4().hex), Order(version=version))

    def orders(self):
        """The orders that nobody answered yet."""
        return [each.version for each in self.control().read_whole().of(Order).values()]

    def champion(self):
        """The champion by the log, which is that of the registry, too; None without one."""
        champion = self.control().read_whole().champion
        named = [each.version for each in self.open().versions() if "champion" in each.aliases]
        assert named == ([] if champion is None else [champion.version])
        return champion and champion.version

    def previous(self):
        return self.open().resolve("previous").version

    def heard(self):
        """What was put into the log since the last call: kinds and versions; None for what is over."""
        _, changes = self.listener.poll(0)
        changes = [each for each in changes if each.kind in TOLD]
        return [(each.kind, getattr(each.value, "version", each.value and "")) for each in changes]

    def judgement(self, version):
        judgement = self.open().resolve(str(version)).judgement
        return "" if judgement is None else str(judgement)

    def judge(self, version, state, reason="by somebody", **fields):
        """As a controller did that was killed then."""
        self.registry.annotate(version, Judgement(state=state, reason=reason, **fields).notes())

    def notes(self, version):
        return json.loads((self.version_folder(version) / "notes.json").read_text())

    def version_folder(self, version):
        return version_folder(self.folder / "registry", version)

    def move_alias(self, **versions):
        """By hand; None deletes the alias."""
        path = self.version_folder(1).parent / "aliases.json"
        aliases = json.loads(path.read_text()) | versions
        path.write_text(json.dumps({name: number for name, number in aliases.items() if number}))
