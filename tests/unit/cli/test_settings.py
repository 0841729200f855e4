"""`omnidraft settings` shows what is set and what it does, and no secret."""

from pathlib import Path

import pytest

from tests.cli_runs import run_cli


def test_settings_have_the_values_of_the_environment_and_their_descriptions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMNIDRAFT_WORKER__PORT", "8123")
    done = run_cli(["settings", "worker.po"], monkeypatch, capsys)
    assert done.returncode == 0
    assert done.stdout.startswith(
        "worker.port = 8123\n    (int >= 0 <= 65535; default 8000, set by OMNIDRAFT_WORKER__PORT)\n"
    )
    assert "learner." not in done.stdout


def test_effective_settings_are_those_that_something_sets_each_with_what_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The environment wins over the file, and an address with a short name over its long one."""
    file = tmp_path / "fleet.toml"
    file.write_text('[learner]\nloss = "nll"\nlora_rank = 8\n[models.tool_formats]\nmine = "llama3"\n')
    given = {
        "LEARNER__LORA_RANK": "16", "LOG__URL": "sqlite:///long.db", "LOG": "sqlite:///short.db",
        "LOG__KAFKA__PASSWORD": "one-two-three",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"OMNIDRAFT_{name}", value)
    done = run_cli(["settings", "--effective", "--config", str(file)], monkeypatch, capsys)
    assert set(done.stdout.splitlines()) == {
        f"learner.loss = 'nll'    # {file}",
        "learner.lora_rank = 16    # OMNIDRAFT_LEARNER__LORA_RANK",
        f"models.tool_formats = {{'mine': 'llama3'}}    # {file}",
        "log.url = 'sqlite:///short.db'    # OMNIDRAFT_LOG",
        "log.kafka.password = SecretStr('**********')    # OMNIDRAFT_LOG__KAFKA__PASSWORD",
    }


def test_passwords_are_masked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMNIDRAFT_LOG__KAFKA__PASSWORD", "one-two-three")
    monkeypatch.setenv("OMNIDRAFT_REGISTRY__URL", "http://me:four-five@mlflow:5000")
    done = run_cli(["settings"], monkeypatch, capsys)
    assert "registry.url = 'http://" in done.stdout
    assert "one-two" not in done.stdout
    assert "four-five" not in done.stdout


@pytest.mark.parametrize(("name", "near"), [("worker.prot", "worker.port"), ("canary_shares", "canary_share")])
def test_a_name_that_no_setting_contains_is_refused_with_the_nearest(
    name: str, near: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_cli(["settings", name], monkeypatch, capsys)
    assert done.returncode == 2
    assert f"no setting's name contains {name!r}" in done.stderr
    assert near in done.stderr
