"""A running fleet remembers what it said to a tenant: the learner makes the memory, the worker takes it up with the
snapshot, drafts from it for that tenant alone, and serves without it from a version that has none."""

from pathlib import Path

import pytest

from omnidraft import assembly
from omnidraft.bus.encryption import new_key
from omnidraft.config import NO_DRAFTER
from omnidraft.snapshots.bundle import MEMORY
from omnidraft.telemetry.metrics import CountingMetrics
from tests.tiny_fleet import Fleet, fleet_settings, memory_of, running_fleet

PATIENCE_S = 90.0


def said(fleet: Fleet, user: str) -> str:
    text: str = fleet.ask(user=user).json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize(
    "is_encrypted", [pytest.param(False, marks=pytest.mark.long), True], ids=["plain", "encrypted"]
)
def test_a_worker_drafts_for_a_tenant_what_the_fleet_said_to_it_and_the_text_stays(
    tiny_models: tuple[Path, Path],
    omnidraft_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_encrypted: bool,
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    log = {"url": f"sqlite:///{tmp_path}/log.db", "encryption_keys": [new_key()] if is_encrypted else []}
    settings = fleet_settings(tiny_models, tmp_path, log=log)
    with running_fleet(settings, tmp_path) as fleet:
        before = said(fleet, "a")
        seeds = iter(range(10_000))

        def is_remembered() -> bool:
            fleet.ask(user="a", seed=next(seeds), temperature=1.0).raise_for_status()
            return memory_of(fleet.worker)("a") is not None

        fleet.ask_until(is_remembered, PATIENCE_S)
        memory = memory_of(fleet.worker)
        assert memory("b") is None
        assert [said(fleet, user) for user in ("a", "b")] == [before, before]
    with_memory = [
        each.version
        for each in assembly.registry(settings).versions()
        if any(MEMORY in name for name in each.manifest.sha256)
    ]
    newest = assembly.engine(settings, CountingMetrics(), snapshot=str(with_memory[-1]))
    assert memory_of(newest)("a") is not None
    first = assembly.engine(settings, CountingMetrics(), snapshot="1")
    assert memory_of(first)("a") is None
    models = settings.models.model_copy(update={"drafter": NO_DRAFTER, "memory_of": settings.models.drafter})
    without_drafter = settings.model_copy(update={"models": models})
    alone = assembly.engine(without_drafter, CountingMetrics(), snapshot=str(with_memory[-1]))
    assert memory_of(alone)("a") is not None
    assert memory_of(alone)("never served") is None
