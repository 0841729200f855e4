"""Commands that order the fleet about: what is ordered is printed, and what nobody would follow is refused."""

from pathlib import Path

import pytest

from omnidraft import assembly, config
from omnidraft.assembly.fleet import control_log
from omnidraft.ports import Outgoing, Restart, Rewind
from omnidraft.telemetry.metrics import CountingMetrics
from tests.cli_runs import Run
from tests.snapshot_folders import make_bundle


@pytest.fixture(autouse=True)
def targets(environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ["OMNIDRAFT_MODELS__MORE_TARGETS"] = '["other"]'
    monkeypatch.chdir(tmp_path)


def num_orders(environ: dict[str, str]) -> int:
    settings = config.load(None, environ)
    return sum(assembly.log_reader(settings, settings.log.control_topic).end_offsets().values())


def begin_log(environ: dict[str, str]) -> None:
    """Do what the first service does."""
    settings = config.load(None, environ)
    assembly.log_writer(settings, settings.log.traces_topic)


@pytest.mark.parametrize("order", ["pause", "restart --from latest", "factors off acme"])
def test_an_order_where_no_service_has_begun_a_log_is_refused_and_begins_none(
    command: Run, tmp_path: Path, order: str
) -> None:
    done = command("tenants" if order.startswith("factors") else "learning", *order.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"omnidraft: there is no log at sqlite:///{tmp_path}/log.db yet: a service makes it; run "
        "this where the services run, or name --config\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_no_tenant_is_forgotten_where_there_is_no_log(command: Run, tmp_path: Path) -> None:
    done = command("tenants", "forget", "acme", "--yes")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"omnidraft: there is no log at {tmp_path}/log.db: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_snapshot_is_not_published_and_makes_no_registry(
    command: Run, environ: dict[str, str], tmp_path: Path
) -> None:
    environ["OMNIDRAFT_REGISTRY__URL"] = f"sqlite:///{tmp_path}/registry/mlflow.db"
    done = command("snapshots", "publish", str(tmp_path / "nowhere"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "nowhere has no readable manifest.json" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("order", "target"), [(("pause",), "nope"), (("rewind", "1"), "")])
def test_an_order_for_a_target_that_nobody_learns_for_is_refused(
    command: Run, environ: dict[str, str], order: tuple[str, ...], target: str
) -> None:
    done = command("learning", *order, "--target", target)
    assert done.returncode == 2
    assert done.stderr == f"omnidraft: {target!r} is none of the targets in the settings: big, other\n"
    assert num_orders(environ) == 0


@pytest.mark.parametrize(("kind", "target"), [("pause", "other"), ("pause", None), ("resume", None)])
def test_what_is_ordered_is_printed(command: Run, environ: dict[str, str], kind: str, target: str | None) -> None:
    begin_log(environ)
    if kind == "resume":
        assert command("learning", "pause").returncode == 0
    done = command("learning", kind, *(("--target", target) if target else ()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"ordered: learning {kind}s for {target or 'all targets'}, ")
    settings = config.load(None, environ)
    for each in settings.models.targets:
        is_meant = target in (None, each)
        state = control_log(settings.for_target(each), CountingMetrics()).read_whole()
        assert state.is_paused == (kind == "pause" and is_meant)


@pytest.mark.parametrize("order", ["factors off", "forget --yes"])
def test_a_tenant_without_a_name_is_refused(command: Run, environ: dict[str, str], order: str) -> None:
    done = command("tenants", *order.split(), "")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "omnidraft: the tenant has no name; give it as its trace records name it\n"
    assert num_orders(environ) == 0


def test_learning_goes_back_to_a_version_of_the_target_that_is_named(
    command: Run, environ: dict[str, str], tmp_path: Path
) -> None:
    """Without one of several it could be meant for any."""
    settings = config.load(None, environ)
    begin_log(environ)
    registry = assembly.registry(settings.for_target("other"))
    for parent, name in enumerate(("s1", "s2")):
        folder = make_bundle(tmp_path, name, target="other", drafter=settings.models.drafter)
        registry.publish(folder, parent or None)
    done = command("learning", "rewind", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "each target has versions of its own: name one with --target, big, other" in done.stderr
    done = command("learning", "rewind", "latest", "--target", "other")
    assert (done.returncode, "version 2 is the newest" in done.stderr) == (2, True)
    done = command("learning", "rewind", "1", "--target", "other")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ordered: learning goes back to version 1 for other, ")
    states = [control_log(settings.for_target(each), CountingMetrics()).read_whole() for each in ("big", "other")]
    assert [each.value(Rewind, "rewind") for each in states] == [None, Rewind(version=1, id="s2", is_ordered=True)]
    registry.remove_files(1, ("serving",))
    done = command("learning", "rewind", "1", "--target", "other")
    assert (done.returncode, "version 1 has no weights any more" in done.stderr) == (2, True)


def test_latest_is_the_end_of_the_log_when_it_was_ordered(command: Run, environ: dict[str, str]) -> None:
    settings = config.load(None, environ)
    traces = assembly.log_writer(settings, settings.log.traces_topic)
    traces.append([Outgoing(b"", b"", partition=0) for _ in range(3)])
    assert command("learning", "restart", "--from", "latest").returncode == 0
    order = control_log(settings.for_target("big"), CountingMetrics()).read_whole().value(Restart, "restart")
    assert order is not None
    assert order.start.split()[0] == "0:3"
