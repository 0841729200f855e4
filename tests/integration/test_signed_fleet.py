"""A fleet with keys, end to end: who holds public keys only follows, and can neither publish nor promote."""

from pathlib import Path

import pytest

from omnidraft import assembly
from omnidraft.assembly.fleet import controller
from omnidraft.errors import ConfigError, SnapshotCorrupt
from omnidraft.ports import Champion, Pause
from omnidraft.telemetry.metrics import CountingMetrics
from tests.cli_runs import run_cli
from tests.signed_fleet import DRAFTER, TARGET, Keys, Worker, put, settings_of
from tests.snapshot_folders import make_bundle

TOLD = {"held_out_records": 8, "agreement_change_error": 0.001}


@pytest.fixture
def keys():
    return Keys()


def toml(settings, path: Path) -> Path:
    """Settings of a command, without its private key."""
    registry, log = settings.registry, settings.log
    trusted = ", ".join(f'"{key}"' for key in registry.trusted_keys)
    path.write_text(
        f'[models]\ntarget = "{TARGET}"\ndrafter = "{DRAFTER}"\n[log]\nurl = "{log.url}"\n'
        f'[registry]\nurl = "{registry.url}"\n'
        f"trusted_keys = [{trusted}]\n"
    )
    return path


@pytest.mark.parametrize("store", ["directory:///{}/registry", "sqlite:///{}/mlflow.db"])
def test_a_worker_with_public_keys_follows_the_controller_and_an_operators_rollback(
    store, keys, tmp_path, monkeypatch, capsys
):
    url = store.format(tmp_path)
    distiller, operator = (settings_of(keys, tmp_path, role, url) for role in ("distiller", "operator"))
    publisher = assembly.registry(distiller)
    publisher.publish(make_bundle(tmp_path / "made", "s1", **TOLD), None)
    judging = controller(settings_of(keys, tmp_path, "controller", url), CountingMetrics())
    judging.step()
    worker = Worker(settings_of(keys, tmp_path, registry_url=url), tmp_path / "staging")
    assert worker.step() == 1

    better = TOLD | {"parent_id": "s1", "agreement_before": 0.6, "agreement_after": 0.8}
    publisher.publish(make_bundle(tmp_path / "made", "s2", **better), 1)
    judging.step()
    assert worker.step() == 2

    judging.close()  # so that the command carries its order out
    private = {"OMNIDRAFT_REGISTRY__PRIVATE_KEY": keys.texts["operator"]}
    path = toml(operator, tmp_path / "operator.toml")
    without = run_cli(("snapshots", "rollback", "--config", path), monkeypatch, capsys)
    assert (without.returncode != 0, "registry.private_key" in without.stderr) == (True, True)
    assert (worker.step(), publisher.resolve("champion").version) == (2, 2)
    done = run_cli(("snapshots", "rollback", "--config", path), monkeypatch, capsys, private)
    assert done.returncode == 0, done.stderr
    assert "champion is version 1 (was 2, promoted by the controller" in done.stdout
    controller(settings_of(keys, tmp_path, "controller", url), CountingMetrics()).step()
    assert (worker.step(), publisher.resolve("champion").version) == (1, 1)
    assert Worker(settings_of(keys, tmp_path, registry_url=url), tmp_path / "other").step() == 1


def test_public_keys_neither_publish_nor_order(keys, tmp_path):
    publisher = assembly.registry(settings_of(keys, tmp_path, "distiller"))
    publisher.publish(make_bundle(tmp_path / "made", "s1", **TOLD), None)
    worker = settings_of(keys, tmp_path)
    registry = assembly.registry(worker)
    with pytest.raises(SnapshotCorrupt, match="has no signature"):
        registry.publish(make_bundle(tmp_path / "made", "s2", **TOLD), 1)
    values = {("champion",): Champion(version=1, digest="d"), ("pause",): Pause()}
    for key, value in values.items():
        with pytest.raises(ConfigError, match=r"registry\.private_key"):
            put(worker, key, value)
        with pytest.raises(ConfigError, match="distiller's key"):
            put(settings_of(keys, tmp_path, "distiller"), key, value)
    with pytest.raises(ConfigError, match="controller's key"):
        put(settings_of(keys, tmp_path, "controller"), ("pause",), Pause())
    assert assembly.control_log(settings_of(keys, tmp_path), CountingMetrics()).read_whole().entries == {}
    with pytest.raises(ConfigError, match="controller's key"):
        assembly.registry(settings_of(keys, tmp_path, "controller")).publish(
            make_bundle(tmp_path / "made", "s3", **TOLD), 1
        )


@pytest.mark.parametrize("arguments", [("pause",), ("resume",), ("restart", "--from", "latest")])
def test_orders_to_the_learner_are_the_operators(arguments, keys, tmp_path, monkeypatch, capsys):
    settings = settings_of(keys, tmp_path)
    path = toml(settings, tmp_path / "settings.toml")
    assembly.log_writer(settings, settings.log.traces_topic)  # as the first service does
    for role in (None, "distiller", "controller"):
        environ = {"OMNIDRAFT_REGISTRY__PRIVATE_KEY": keys.texts[role]} if role else {}
        refused = run_cli(("learning", *arguments, "--config", path), monkeypatch, capsys, environ)
        assert refused.returncode != 0
        assert "registry.private_key" in refused.stderr
        assert "Traceback" not in refused.stderr
    environ = {"OMNIDRAFT_REGISTRY__PRIVATE_KEY": keys.texts["operator"]}
    assert run_cli(("learning", *arguments, "--config", path), monkeypatch, capsys, environ).returncode == 0
    (entry,) = assembly.control_log(settings_of(keys, tmp_path), CountingMetrics()).poll(0.0)[1]
    assert entry.kind == {"resume": "pause"}.get(arguments[0], arguments[0])


def test_snapshots_from_before_the_keys_are_signed_by_an_operator(keys, tmp_path, monkeypatch, capsys):
    without = settings_of(keys, tmp_path, "operator", private_key=None, trusted_keys=())
    assembly.registry(without).publish(make_bundle(tmp_path / "made", "s1", **TOLD), None)
    assembly.log_writer(without, without.log.traces_topic)  # as the first service does
    reader = assembly.registry(settings_of(keys, tmp_path))
    with pytest.raises(SnapshotCorrupt, match="snapshots sign"):
        reader.fetch(1, tmp_path / "fetched")
    environ = {"OMNIDRAFT_REGISTRY__PRIVATE_KEY": keys.texts["operator"]}
    path = toml(settings_of(keys, tmp_path, "operator"), tmp_path / "operator.toml")
    refused = run_cli(("snapshots", "promote", "1", "--config", path), monkeypatch, capsys, environ)
    assert (refused.returncode != 0, "snapshots sign" in refused.stderr) == (True, True)
    done = run_cli(("snapshots", "sign", "1", "--config", path), monkeypatch, capsys, environ)
    assert "published as version 2" in done.stdout, done.stderr
    reader.fetch(2, tmp_path / "fetched")


def test_without_a_key_nothing_is_signed(keys, tmp_path, monkeypatch, capsys):
    settings = settings_of(keys, tmp_path, "operator", private_key=None, trusted_keys=())
    assembly.registry(settings).publish(make_bundle(tmp_path / "made", "s1", **TOLD), None)
    path = toml(settings, tmp_path / "operator.toml")
    done = run_cli(("snapshots", "sign", "1", "--config", path), monkeypatch, capsys, {})
    assert (done.returncode, "registry.private_key is not set" in done.stderr) == (2, True)
    assert len(assembly.registry(settings).versions()) == 1


def test_a_key_is_replaced_after_an_operator_signed_too(keys, tmp_path, monkeypatch, capsys):
    publisher = assembly.registry(settings_of(keys, tmp_path, "distiller"))
    publisher.publish(make_bundle(tmp_path / "made", "s1", **TOLD), None)
    path = toml(settings_of(keys, tmp_path, "operator"), tmp_path / "operator.toml")
    environ = {"OMNIDRAFT_REGISTRY__PRIVATE_KEY": keys.texts["operator"]}
    done = run_cli(("snapshots", "sign", "1", "--config", path), monkeypatch, capsys, environ)
    assert "published as version 2" in done.stdout, done.stderr
    without = assembly.registry(settings_of(keys, tmp_path, trusted_keys=keys.public[1:]))
    without.fetch(2, tmp_path / "fetched")
    with pytest.raises(SnapshotCorrupt, match="not signed by a trusted distiller"):
        without.fetch(1, tmp_path / "fetched")


def test_a_new_pair_of_keys_is_printed_or_kept_in_a_file(tmp_path, monkeypatch, capsys):
    private, public = run_cli(("snapshots", "new-key"), monkeypatch, capsys).stdout.split()
    assert (private.split(":")[0], public.split(":")[:2]) == ("ed25519-private", ["operator", "ed25519"])
    out = tmp_path / "key"
    printed = run_cli(("snapshots", "new-key", "--role", "distiller", "--out", out), monkeypatch, capsys).stdout
    assert printed.startswith("distiller:ed25519:")
    assert out.stat().st_mode & 0o777 == 0o600
    settings_of(
        Keys(), tmp_path, registry_url=None, private_key=out.read_text().strip(), trusted_keys=(printed.strip(),)
    )
    for arguments in (("--role", "king"), ("--out", out)):
        assert run_cli(("snapshots", "new-key", *arguments), monkeypatch, capsys).returncode != 0
