"""Purging snapshots of a forgotten tenant where some targets have none."""

from pathlib import Path

import pytest

from omnidraft import assembly, config
from omnidraft.assembly.tenants import TenantData, purge_snapshots
from omnidraft.config import Settings
from omnidraft.distill.ingest.tenant_messages import TenantMessages
from tests.snapshot_folders import make_bundle

DATA = TenantData(0, TenantMessages([(0, 0)]), TenantMessages())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return config.load(
        None,
        {},
        log={"url": f"sqlite:///{tmp_path}/log.db"},
        registry={"url": f"directory:///{tmp_path}/registry"},
        models={"target": "new", "more_targets": ["big"], "drafter": "org/small"},
    )


def test_a_target_without_snapshots_holds_up_nobody(settings: Settings, tmp_path: Path) -> None:
    registry = assembly.registry(settings.for_target("big"))
    registry.publish(make_bundle(tmp_path, "s1", offsets={0: 4}), None)
    registry.publish(make_bundle(tmp_path, "s2", offsets={0: 4}, forgets=("order",)), 1)
    assembly.registry(settings.for_target("new"))
    purged: list[None] = []
    done = purge_snapshots(settings, DATA, "order", 5.0, lambda: purged.append(None))
    assert done == {"new": [], "big": [1]}
    assert len(purged) == 2


def test_without_a_registry_there_is_nothing_to_wait_for(settings: Settings) -> None:
    assert purge_snapshots(settings, DATA, "order", 600.0) == {"new": [], "big": []}
