"""`omnidraft config` shows what is set and what it does, and no secret."""

import pytest

from tests.cli_runs import run_cli


def test_settings_have_the_values_of_the_environment_and_their_descriptions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMNIDRAFT_WORKER__PORT", "8123")
    done = run_cli(["config", "worker.po"], monkeypatch, capsys)
    assert done.returncode == 0
    assert done.stdout.startswith("worker.port = 8123\n")
    assert "learner." not in done.stdout


def test_passwords_are_masked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMNIDRAFT_LOG__KAFKA__PASSWORD", "one-two-three")
    monkeypatch.setenv("OMNIDRAFT_REGISTRY__URL", "http://me:four-five@mlflow:5000")
    done = run_cli(["config"], monkeypatch, capsys)
    assert "registry.url = 'http://" in done.stdout
    assert "one-two" not in done.stdout
    assert "four-five" not in done.stdout


@pytest.mark.parametrize(("name", "near"), [("worker.prot", "worker.port"), ("canary_shares", "canary_share")])
def test_a_name_that_no_setting_contains_is_refused_with_the_nearest(
    name: str, near: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_cli(["config", name], monkeypatch, capsys)
    assert done.returncode == 2
    assert f"no setting's name contains {name!r}" in done.stderr
    assert near in done.stderr
