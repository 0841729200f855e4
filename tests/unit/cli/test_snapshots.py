"""`omnidraft snapshots`: an order is carried out, by whoever is the controller, and what became of it is said."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from omnidraft import assembly, config
from omnidraft.fleet.controller import Controller
from omnidraft.ports import Judgement
from omnidraft.telemetry.metrics import CountingMetrics
from tests.cli_runs import Run
from tests.snapshot_folders import make_bundle


@pytest.fixture
def settings(environ: dict[str, str]) -> config.Settings:
    return config.load(None, environ)


@pytest.fixture
def snapshots(command: Run, settings: config.Settings, tmp_path: Path) -> Run:
    """The commands, over a registry with four versions."""
    registry, drafter = assembly.registry(settings), settings.models.drafter
    assembly.log_writer(settings, settings.log.traces_topic).close()
    for number in range(4):
        told = {"agreement_before": 0.7, "agreement_after": 0.75, "agreement_change_error": 0.01}
        told |= {"settings": {"lora_rank": "32", "loss": "dm", "pinned": "None"}} if number else {}
        told["parent_id"] = f"s{number}" if number else None
        bundle = make_bundle(tmp_path / "bundles", f"s{number + 1}", target="big", drafter=drafter, **told)
        registry.publish(bundle, number or None)
    return partial(command, "snapshots")


def champions(settings: config.Settings) -> tuple[int, int]:
    """By the log, and by the registry."""
    champion = assembly.ordering_log(settings).read_whole().champion
    assert champion is not None
    return champion.version, assembly.registry(settings).resolve("champion").version


def test_where_no_controller_runs_beside_a_log_of_this_machine_the_command_itself_carries_the_order_out(
    snapshots: Run, settings: config.Settings
) -> None:
    assert snapshots("promote", "2").stdout == "champion is version 2\n"
    was = r"promoted by an operator [\d.]+ (s|min) ago"
    assert re.fullmatch(rf"champion is version 4 \(was 2, {was}\)\n", snapshots("promote", "challenger").stdout)
    done = snapshots("rollback")
    assert done.returncode == 0
    assert re.fullmatch(rf"champion is version 2 \(was 4, {was}\)\n", done.stdout)
    assert champions(settings) == (2, 2)
    assert str(assembly.registry(settings).resolve("2").judgement) == "promoted by an operator"


def test_a_rollback_is_repeated_to_what_an_operator_left_only_when_he_is_sure(
    snapshots: Run, settings: config.Settings
) -> None:
    for version in (1, 3, 2):
        snapshots("promote", version)
    done = snapshots("rollback")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("omnidraft: an operator left version 3 for version 2: --to VERSION goes further back")
    assert "champion is version 1 (was 2," in snapshots("rollback", "--to", "1").stdout
    assert "champion is version 2 (was 1," in snapshots("rollback", "--yes").stdout
    assert champions(settings) == (2, 2)


def test_there_is_nothing_to_go_back_to_before_the_second_promotion(snapshots: Run) -> None:
    for _ in range(2):
        done = snapshots("rollback")
        assert (done.returncode, done.stdout) == (2, "")
        assert "names no champion before this one: `omnidraft snapshots promote VERSION`" in done.stderr
        snapshots("promote", "1")


def test_a_version_that_does_not_exist_is_refused_with_those_that_do(snapshots: Run, settings: config.Settings) -> None:
    done = snapshots("promote", "99")
    assert (done.returncode, done.stderr) == (2, "omnidraft: there is no version 99; there are versions 1 to 4\n")
    snapshots("promote", "2")
    done = snapshots("rollback", "--to", "99")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("omnidraft: refused: there is no version 99; there are versions 1 to 4\n")
    assert champions(settings) == (2, 2)


def test_an_order_that_nobody_answers_waits_and_that_is_said(
    snapshots: Run, settings: config.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots("promote", "2")
    controller = assembly.controller(settings, CountingMetrics())
    controller.obey()  # it runs, and is slow
    monkeypatch.setattr("omnidraft.assembly.fleet.ANSWER_S", 0.2)
    done = snapshots("promote", "1")
    assert done.returncode == 1
    assert done.stdout.startswith("ordered: version 1, as soon as a controller runs; none has answered yet")
    assert champions(settings) == (2, 2)
    controller.step()
    assert champions(settings) == (1, 1)


@contextmanager
def running(controller: Controller) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=controller.run, args=(stop,))
    thread.start()
    yield
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


def test_a_controller_that_runs_carries_the_order_out_and_keeps_its_lease(
    snapshots: Run, settings: config.Settings
) -> None:
    snapshots("promote", "1")
    with running(assembly.controller(settings, CountingMetrics())):
        assert "champion is version 2 (was 1, promoted by an operator" in snapshots("promote", "2").stdout
        assert "champion is version 1 (was 2, promoted by an operator" in snapshots("rollback").stdout
    assert champions(settings) == (1, 1)


def test_versions_are_listed_with_age_gain_and_judgement_and_shown_as_typed_json(
    snapshots: Run, settings: config.Settings
) -> None:
    snapshots("promote", "2")
    reason = f"worse \x1b[2J than [/the champion], {'and so on ' * 9}"
    judgement = Judgement(state="refused", reason=reason, gain=-0.1, gain_error=0.02)
    assembly.registry(settings).annotate(3, judgement.notes())
    lines = snapshots("list").stdout.splitlines()
    (row,) = [line.split() for line in lines if line.split()[0] == "3"]
    assert row[-5:] == ["0.750", "+0.050", "+-", "0.020", "refused"]
    told = [line.rstrip() for line in lines]
    assert f"3: refused: {reason}".replace("\x1b", "?").rstrip() in told
    assert "2: promoted by an operator" in told
    shown = json.loads(snapshots("show", "3").stdout)
    assert (shown["version"], shown["parent"]) == (3, 2)
    assert shown["manifest"]["settings"] == {"lora_rank": 32, "loss": "dm", "pinned": None}
    assert (shown["judgement"]["state"], shown["judgement"]["gain"]) == ("refused", -0.1)
    assert json.loads(snapshots("list", "--json").stdout)[2] == shown
