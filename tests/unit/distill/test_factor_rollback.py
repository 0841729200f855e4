"""An operator takes back an earlier fit of one tenant's factors: workers get it, and the learner goes on from it."""

from pathlib import Path

import pytest
import torch

from omnidraft.bus.encryption import new_key
from omnidraft.bus.key_store import KeyStore
from omnidraft.bus.tenant_keys import TenantKeys
from omnidraft.distill.factor_rollback import FactorRollback
from omnidraft.distill.publisher import LEARNER
from omnidraft.distill.resume_encryption import decrypt_records
from omnidraft.errors import SnapshotError, SnapshotNotFound
from omnidraft.ports import RecordCipher
from omnidraft.registry.republish import republish
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest, TenantFactors
from omnidraft.snapshots.tenant_factors import FACTORS, FittedFactors, file_name, from_tensor
from tests.distiller_runs import Setting
from tests.unit.distill.test_tenant_factors import EAGER, TENANTS, emit, folder_of, run

STILL = 1e-30
"""A learning rate that changes no bit of the weights that all tenants share."""


@pytest.fixture
def setting(lively_pair, tmp_path: Path) -> Setting:
    setting = Setting(lively_pair, tmp_path, learning_rate=STILL, tenant_factors=EAGER)
    emit(setting)
    return setting


def fit_of(manifest: Manifest, tenant: str) -> TenantFactors:
    return next(each for each in manifest.tenant_factors if each.tenant == tenant)


def versions_with_factors(setting: Setting) -> list[int]:
    versions = [each for each in setting.registry.versions() if each.manifest.tenant_factors]
    assert len({fit_of(each.manifest, TENANTS[0]).base for each in versions}) == 1
    return [each.version for each in versions]


def factors_in(folder: Path, name: str, cipher: RecordCipher | None = None) -> dict[str, FittedFactors]:
    tensors, _ = decrypt_records(bundle.tensors(folder, name), cipher)
    found = [from_tensor(tensor) for each, tensor in tensors.items() if each.startswith(FACTORS)]
    return {each.tenant: each for each in found}


def roll_back(setting: Setting, to: str | None = None, cipher: RecordCipher | None = None, tenant="stayer") -> Manifest:
    return republish(setting.registry, "latest", FactorRollback(setting.registry, tenant, to, cipher)).manifest


def test_the_newest_snapshot_comes_again_with_the_fit_before_and_is_otherwise_the_same(setting: Setting) -> None:
    run(setting)
    *_, earlier, newest = versions_with_factors(setting)
    before = setting.registry.resolve(str(newest)).manifest
    after = roll_back(setting)
    assert fit_of(after, "stayer") == fit_of(setting.registry.resolve(str(earlier)).manifest, "stayer")
    assert fit_of(after, "leaver") == fit_of(before, "leaver")
    assert (after.parent_id, after.offsets) == (before.snapshot_id, before.offsets)
    assert not after.is_republished
    changed = {name for name in before.sha256 | after.sha256 if before.sha256.get(name) != after.sha256.get(name)}
    assert changed == {file_name("stayer"), LEARNER}


def test_the_learner_goes_on_from_the_fit_that_was_taken_back(setting: Setting) -> None:
    run(setting)
    first, *_ = versions_with_factors(setting)
    taken_back = roll_back(setting, str(first))
    folder = folder_of(setting)
    served, learned = factors_in(folder, file_name("stayer")), factors_in(folder, LEARNER)
    assert set(learned) == set(TENANTS)
    for name, tensor in served["stayer"].tensors.items():
        assert torch.equal(learned["stayer"].tensors[name], tensor.float())
    emit(setting, num=4, start=100)
    assert run(setting)["stayer"].version > fit_of(taken_back, "stayer").version
    later = setting.registry.versions()[-1].manifest
    assert fit_of(later, "stayer").version < fit_of(later, "leaver").version


def test_encrypted_factors_are_taken_back_encrypted(setting: Setting, tmp_path: Path) -> None:
    cipher = TenantKeys(KeyStore(f"sqlite:///{tmp_path}/keys.db", timeout_s=1.0), [new_key()])
    run(setting, cipher=cipher)
    earlier = versions_with_factors(setting)[-2]
    taken_back = roll_back(setting, None, cipher)
    assert fit_of(taken_back, "stayer") == fit_of(setting.registry.resolve(str(earlier)).manifest, "stayer")
    folder = folder_of(setting)
    assert not any(name.endswith(("000000", "000001")) for name in bundle.tensors(folder, LEARNER) if FACTORS in name)
    served = factors_in(folder, file_name("stayer"), cipher)["stayer"]
    assert served.version == factors_in(folder, LEARNER, cipher)["stayer"].version


def test_factors_that_fit_other_weights_are_refused_and_nothing_is_published(lively_pair, tmp_path: Path) -> None:
    setting = Setting(lively_pair, tmp_path, learning_rate=1e-4, tenant_factors=EAGER)
    emit(setting)
    run(setting)
    versions = setting.registry.versions()
    first = next(each for each in versions if each.manifest.tenant_factors)
    with pytest.raises(SnapshotError, match="fit other weights than the newest"):
        roll_back(setting, str(first.version))
    with pytest.raises(SnapshotNotFound, match="no version has another fit of the factors of stayer"):
        roll_back(setting)
    assert setting.registry.versions() == versions


def test_a_version_without_such_factors_and_a_tenant_without_any_are_refused(setting: Setting) -> None:
    run(setting)
    with pytest.raises(SnapshotNotFound, match="version 1 has no factors that serve stayer"):
        roll_back(setting, "1")
    with pytest.raises(SnapshotNotFound, match="of nobody"):
        roll_back(setting, tenant="nobody")
    with pytest.raises(SnapshotNotFound):
        roll_back(setting, "99")


def test_factors_whose_files_are_deleted_are_passed_over(setting: Setting) -> None:
    run(setting)
    *_, before, earlier, newest = versions_with_factors(setting)
    assert newest == setting.registry.versions()[-1].version
    setting.registry.remove_files(earlier, ("serving",))
    with pytest.raises(SnapshotNotFound, match="keep_serving"):
        roll_back(setting, str(earlier))
    taken_back = fit_of(roll_back(setting), "stayer")
    assert taken_back == fit_of(setting.registry.resolve(str(before)).manifest, "stayer")


def test_what_was_learned_before_a_tenant_was_forgotten_does_not_come_back(setting: Setting) -> None:
    run(setting)
    first, *_ = versions_with_factors(setting)

    def forget(folder: Path, manifest: Manifest):
        return {"forgets": ("order",)}, {}

    republish(setting.registry, "latest", forget)
    with pytest.raises(SnapshotError, match="a tenant was forgotten since version"):
        roll_back(setting, str(first))
    with pytest.raises(SnapshotNotFound):
        roll_back(setting)
