"""The rehearsal of a drift, as a person starts it."""

from pathlib import Path

import pytest

from tests.cli_runs import run_cli

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_traffic_changes_the_alarm_goes_off_and_the_fleet_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_cli(["demo", "--drift", "--out", tmp_path], monkeypatch, capsys)
    assert done.returncode == 0, done.stderr
    moments = [done.stdout.index(text) for text in ("traffic changes:", "the alarm:", "the recovery:", "picture:")]
    assert moments == sorted(moments)
    assert "did not come" not in done.stdout
    assert (tmp_path / "drift.png").is_file()
