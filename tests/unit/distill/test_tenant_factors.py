"""With each snapshot tenants' factors are fitted on its weights, judged, and published if they are better; they survive
a crash and not an order to forget."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from omnidraft.bus.encryption import new_key
from omnidraft.bus.key_store import KeyStore
from omnidraft.bus.tenant_keys import TenantKeys
from omnidraft.distill.distiller import Distiller
from omnidraft.distill.evaluation.tenant_factors import FactorJudge
from omnidraft.distill.ingest.tenant_shares import TenantGroups
from omnidraft.distill.publisher import LEARNER
from omnidraft.distill.resume_encryption import decrypt_records
from omnidraft.distill.training.tenant_factors import FactorPlan
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import TenantFactors
from omnidraft.snapshots.tenant_factors import FACTORS, file_name, from_tensor, weights_digest
from tests.distiller_runs import TEXTS, Killed, Setting, names, run_until_idle

NOW_MS = time.time_ns() // 1_000_000
EAGER = FactorPlan(rank=4, steps=6, learning_rate=1e-2)
"""Learns fast."""
TENANTS = ("leaver", "stayer")


def setting_of(pair, folder: Path, most_tenants: int = 3, plan: FactorPlan = EAGER) -> Setting:
    """The shared drafter learns next to nothing, so that there is something left for factors."""
    return Setting(pair, folder, learning_rate=1e-6, factor_tenants=most_tenants, factor_plan=plan)


@pytest.fixture
def setting(lively_pair, tmp_path: Path) -> Setting:
    return setting_of(lively_pair, tmp_path)


def emit(setting: Setting, num: int = 12, start: int = 0, tenants=TENANTS) -> None:
    """In turn; each tenant says one thing again and again, which its factors learn."""
    named = [setting.names(num, 1000 * number + start, every=2) for number, _ in enumerate(tenants)]
    for names_at in zip(*named, strict=True):
        for number, (name, tenant) in enumerate(zip(names_at, tenants, strict=True)):
            text = TEXTS[(number + 2) % len(TEXTS)]
            setting.emit(name, text=text, seed=0, tenant=tenant, time_ms=NOW_MS)


def distiller(setting: Setting, *, groups: TenantGroups | None = None, confidence: float = 0.5, **options) -> Distiller:
    """Content with any gain, unless it has to be sure."""
    most = setting.learner["factor_tenants"]
    judge = partial(FactorJudge, most_tenants=most, groups=groups, confidence=confidence)
    made, _ = setting.distiller(held_out_every=2, limits={"held_out_records": 24}, factor_judge=judge, **options)
    return made


def run(setting: Setting, **options) -> dict[str, TenantFactors]:
    run_until_idle(distiller(setting, **options))
    return {each.tenant: each for each in setting.manifest().tenant_factors}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.glob("serving/tenants/*")}


def test_a_tenants_factors_are_published_with_what_they_gain_over_the_weights_that_they_were_fitted_on(setting):
    emit(setting)
    factors = run(setting)
    folder = setting.fetched()
    assert set(factors) == set(TENANTS)
    for tenant, each in factors.items():
        assert each.after > each.before
        assert (each.file, each.rank) == (file_name(tenant), EAGER.rank)
        assert each.base == weights_digest(bundle.serving_tensors(folder))
        [tensor] = bundle.tensors(folder, each.file).values()
        written = from_tensor(tensor)
        assert (written.tenant, written.version) == (tenant, each.version)
        assert all(tensor.dtype == torch.bfloat16 for tensor in written.tensors.values())
    assert files(folder) == {each.file for each in factors.values()}
    assert setting.manifest().sha256.keys() >= files(folder)
    manifests = [version.manifest for version in setting.registry.versions() if version.manifest.tenant_factors]
    versions = [each.version for manifest in manifests for each in manifest.tenant_factors if each.tenant == "stayer"]
    assert len(versions) >= 2
    assert versions == list(range(1, len(versions) + 1))  # each snapshot fits and judges them again
    assert len({manifest.tenant_factors[0].base for manifest in manifests}) == len(manifests)


def test_factors_that_are_not_better_beyond_the_error_are_not_published_and_go_on_learning(lively_pair, tmp_path):
    setting = setting_of(lively_pair, tmp_path, plan=replace(EAGER, learning_rate=1e-12))
    emit(setting)
    factors = run(setting, confidence=0.99)
    assert set(factors) == set(TENANTS)
    assert all(each.file is None and each.version > 1 for each in factors.values())
    assert not files(setting.fetched())


def test_only_tenants_with_enough_held_out_requests_and_only_as_many_as_asked_for_have_factors(lively_pair, tmp_path):
    setting = setting_of(lively_pair, tmp_path / "one", 1)
    emit(setting)
    setting.emit(*names(2, 5000), tenant="newcomer", time_ms=NOW_MS)
    assert len(run(setting)) == 1
    named = setting_of(lively_pair, tmp_path / "named")
    emit(named)
    assert set(run(named, groups=TenantGroups(("stayer",)))) == {"stayer"}


def test_without_the_setting_no_snapshot_has_any(lively_pair, tmp_path):
    setting = setting_of(lively_pair, tmp_path, 0)
    emit(setting, 6)
    assert not run(setting)
    assert not any(name.startswith((FACTORS, "replay.")) for name in setting.masters())


def test_a_killed_and_resumed_run_publishes_the_same_factors_as_an_uninterrupted_one(lively_pair, tmp_path):
    whole, broken = (setting_of(lively_pair, tmp_path / name) for name in ("whole", "broken"))
    for setting in (whole, broken):
        emit(setting)
    expected = run(whole)
    with pytest.raises(Killed):
        run_until_idle(distiller(broken, die_after=3))
    assert run(broken) == expected
    for each in expected.values():
        [one], [other] = (bundle.tensors(setting.fetched(), each.file).values() for setting in (whole, broken))
        assert torch.equal(one, other)


def test_an_order_to_forget_takes_a_tenants_factors_alone_and_one_that_comes_back_begins_anew(setting):
    emit(setting)
    before = run(setting)
    setting.forget("leaver", until_ms=NOW_MS)
    after = run(setting, control=setting.control())
    assert set(after) == {"stayer"}
    assert after["stayer"].version == before["stayer"].version + 1
    assert files(setting.fetched()) == {file_name("stayer")}
    assert {from_tensor(each).tenant for name, each in setting.masters().items() if name.startswith(FACTORS)} == {
        "stayer"
    }
    setting.emit(*setting.names(12, 5000, every=2), tenant="leaver", time_ms=NOW_MS + 1)
    assert 1 < run(setting, control=setting.control())["leaver"].version < 4  # what it learned since then stays
    written = {
        each.tenant: each
        for each in (from_tensor(each) for name, each in setting.masters().items() if name.startswith(FACTORS))
    }
    assert written["leaver"].since_ms == NOW_MS + 1


def test_encrypted_factors_open_with_their_tenants_key_alone(setting, tmp_path):
    store = KeyStore(f"sqlite:///{tmp_path}/keys.db", timeout_s=0.1)
    keys = partial(TenantKeys, store, [new_key()])
    emit(setting)
    factors = run(setting, cipher=keys())
    folder = setting.fetched()
    for part in (*(each.file for each in factors.values()), LEARNER):
        sealed = {name: each for name, each in bundle.tensors(folder, part).items() if name.startswith(FACTORS)}
        assert sealed
        assert not any(b"lora_A" in each.numpy().tobytes() for each in sealed.values())
    store.destroy("leaver")
    opened = {tenant: decrypt_records(bundle.tensors(folder, each.file), keys())[0] for tenant, each in factors.items()}
    assert (len(opened["leaver"]), len(opened["stayer"])) == (0, 1)
    emit(setting, 4, 300, ("stayer",))
    assert "leaver" not in run(setting, cipher=keys())
