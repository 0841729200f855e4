"""A worker drafts with the tenants' factors of its snapshot, and leaves out those that it must not or cannot use."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import SecretStr

from omnidraft import assembly, config
from omnidraft.assembly.logs import record_cipher
from omnidraft.assembly.snapshot_loading import snapshot_loader
from omnidraft.bus.encryption import new_key
from omnidraft.config import LearnerSettings, Settings
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.decode.snapshot.tenant_rules import TenantRules
from omnidraft.distill.resume_encryption import encrypt_records
from omnidraft.errors import SnapshotCorrupt
from omnidraft.ports import FactorsOff, Forget, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.snapshots.low_rank import B
from omnidraft.snapshots.manifest import TenantFactors
from omnidraft.snapshots.tenant_factors import FittedFactors, file_name, tensor_name, to_tensor, weights_digest
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog
from omnidraft.traces.redaction import hash_of_tenant
from tests.cli_runs import run_cli
from tests.control_logs import control_over
from tests.snapshot_folders import manifest
from tests.tiny_engine import tiny_settings


@pytest.fixture
def settings(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    log = {"url": f"sqlite:///{tmp_path}/log.db", "encryption_keys": [new_key()]}
    return tiny_settings(tiny_models, registry={"url": f"directory:///{tmp_path}/registry"}, log=log)


class Snapshots:
    """Snapshots of the base drafter's own weights, with factors of the tenants `a` and `b`."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.tokenizers = assembly.vocabularies(settings)
        learner = assembly.learner(settings.model_copy(update={"learner": LearnerSettings()}), self.tokenizers)
        self.weights, self.shapes = learner.serving_tensors(), learner.factors._initial("a")

    def fitted(self, tenant: str) -> FittedFactors:
        generator = torch.Generator().manual_seed(len(tenant) + ord(tenant[0]))
        random = {name: torch.randn(each.shape, generator=generator) for name, each in self.shapes.items()}
        return FittedFactors(tenant, 1, 0, {name: each.to(torch.bfloat16) for name, each in random.items()})

    def write(
        self,
        name: str,
        *,
        tenants=("a", "b"),
        inside: dict[str, str] | None = None,
        cipher=None,
        **changes,
    ) -> SnapshotVersion:
        """`inside`: whose factors a tenant's file really holds. `changes` of what the manifest says of each."""
        parts, told = {bundle.DRAFTER: self.weights}, []
        for tenant in tenants:
            tensors = {tensor_name(0): to_tensor(self.fitted((inside or {}).get(tenant, tenant)))}
            parts[file_name(tenant)] = tensors if cipher is None else encrypt_records(tensors, cipher)
            fields = {"version": 1, "rank": 8, "num_requests": 9, "before": 0.5, "after": 0.6, "change_error": 0.01}
            base = {"base": weights_digest(self.weights), "file": file_name(tenant)}
            told.append(TenantFactors(tenant=tenant, **fields | base | changes))
        models = self.settings.models
        names = {"target": models.target, "drafter": models.drafter, "train": "full"}
        written = bundle.write(self.folder / name, manifest(name, **names, tenant_factors=told), parts)
        return SnapshotVersion(1, written, (), 1)

    def load(self, version: SnapshotVersion, rules: TenantRules | None = None) -> LoadedSnapshot:
        costs = MeasuredCosts(assembly.target(self.settings, self.tokenizers))
        shared = assembly.shared_drafting(self.settings.decode, costs)
        load = snapshot_loader(self.settings, self.tokenizers, shared, rules=rules or TenantRules())
        return load(version, self.folder / version.manifest.snapshot_id)


@pytest.fixture
def snapshots(settings: Settings, tmp_path: Path) -> Snapshots:
    return Snapshots(settings, tmp_path / "snapshots")


def environ_of(settings: Settings) -> dict[str, str]:
    return {
        "OMNIDRAFT_LOG": settings.log.url,
        "OMNIDRAFT_REGISTRY__URL": settings.registry.url,
        "OMNIDRAFT_MODELS__TARGET": settings.models.target,
        "OMNIDRAFT_MODELS__DRAFTER": settings.models.drafter,
    }


def drafter_of(loaded: LoadedSnapshot):
    return loaded.proposer.sources[-1]  # type: ignore[attr-defined]


def test_the_tenants_of_a_snapshot_draft_with_their_own_factors(snapshots: Snapshots) -> None:
    loaded = snapshots.load(snapshots.write("s"))
    drafter = drafter_of(loaded)
    assert loaded.factors is drafter.factors
    assert loaded.factors.tenants == {"a", "b"}
    logits = [
        (loaded.factors.opener(name) or drafter.model.open)().prefill_or_extend(0, [1, 2, 3])
        for name in ("a", "b", "c")
    ]
    assert len({tuple(each.tolist()) for each in logits}) == 3
    assert np.array_equal(logits[2], drafter.model.open().prefill_or_extend(0, [1, 2, 3]))


def test_factors_that_are_off_or_forgotten_do_not_serve(snapshots: Snapshots) -> None:
    rules, log = TenantRules(), MemoryLog(1)
    control_over(log).put(("forget", "a"), Forget(id="x", until_ms=1))
    rules.state = control_over(log).read_whole()
    factors = snapshots.load(snapshots.write("s"), rules).factors
    assert factors.tenants == {"b"}
    assert factors.opener("b")
    control_over(log).put(("factors", "b"), FactorsOff())
    rules.state = control_over(log).read_whole()
    assert factors.opener("b") is None


@pytest.mark.parametrize(
    ("redactor", "served"),
    [
        ("omnidraft.traces.redaction:hashed_tenant", "a"),
        ("omnidraft.traces.redaction:without_prompts", hash_of_tenant("a")),
        ("my.own:redactor", None),
    ],
)
def test_under_a_redactor_factors_serve_who_is_recorded_by_their_name(
    snapshots: Snapshots, redactor: str, served: str | None
) -> None:
    recorder = snapshots.settings.recorder.model_copy(update={"redactor": redactor})
    snapshots.settings = snapshots.settings.model_copy(update={"recorder": recorder})
    factors = snapshots.load(snapshots.write("s", tenants=[hash_of_tenant("a")])).factors
    assert [name for name in ("a", hash_of_tenant("a")) if factors.opener(name)] == ([served] if served else [])


@pytest.mark.parametrize("changes", [{"file": None}, {"base": "others"}], ids=["not better", "other weights"])
def test_factors_that_are_not_better_or_fit_other_weights_are_not_loaded(snapshots: Snapshots, changes: dict) -> None:
    factors = snapshots.load(snapshots.write("s", **changes)).factors
    assert factors is None or not factors.tenants


def test_a_file_with_another_tenants_factors_is_refused(snapshots: Snapshots) -> None:
    with pytest.raises(SnapshotCorrupt, match="another tenant"):
        snapshots.load(snapshots.write("s", inside={"a": "b"}))


def test_factors_that_do_not_fit_the_drafter_are_refused(snapshots: Snapshots) -> None:
    name = next(name for name in snapshots.shapes if name.endswith(B))
    snapshots.shapes[name] = torch.zeros(3, 8)
    with pytest.raises(SnapshotCorrupt):
        snapshots.load(snapshots.write("s"))


def test_encrypted_factors_serve_as_long_as_their_tenant_has_its_key(snapshots: Snapshots, caplog) -> None:
    version = snapshots.write("s", cipher=record_cipher(snapshots.settings))
    assert snapshots.load(version).factors.tenants == {"a", "b"}
    assembly.logs.key_store(snapshots.settings).destroy("a")
    assert snapshots.load(version).factors.tenants == {"b"}
    log = snapshots.settings.log.model_copy(update={"encryption_keys": [SecretStr(new_key())]})
    snapshots.settings = snapshots.settings.model_copy(update={"log": log})
    with caplog.at_level(logging.WARNING):
        assert not snapshots.load(version).factors.tenants
    assert "drafts without its factors" in caplog.text


def without_store(settings: Settings) -> Settings:
    """With Kafka, which has no key store unless it is told of one."""
    return settings.model_copy(update={"log": settings.log.model_copy(update={"url": "kafka://localhost:1"})})


def test_factors_that_are_encrypted_with_the_master_key_serve(snapshots: Snapshots) -> None:
    snapshots.settings = without_store(snapshots.settings)
    version = snapshots.write("s", cipher=record_cipher(snapshots.settings))
    assert snapshots.load(version).factors.tenants == {"a", "b"}


def test_an_operator_lists_factors_and_turns_them_off(
    snapshots: Snapshots, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    snapshots.write("s")
    assembly.registry(settings).publish(tmp_path / "snapshots" / "s", None)
    environ = environ_of(settings)
    told = run_cli(("tenants", "factors", "list", "--snapshot", "1"), monkeypatch, capsys, environ).stdout
    assert "a: fit 1 of rank 8, agreement 0.5000 -> 0.6000 +- 0.0196 (95 %) on 9 requests, in use" in told
    plain = settings.model_copy(update={"log": config.LogSettings(url=settings.log.url)})
    assembly.log_writer(plain, plain.log.traces_topic)  # as the first service does
    for order in ("off", "on"):
        assert run_cli(("tenants", "factors", order, "a"), monkeypatch, capsys, environ).returncode == 0
        state = assembly.control_log(plain, CountingMetrics()).read_whole()
        assert state.has_factors_off("a") == (order == "off")
