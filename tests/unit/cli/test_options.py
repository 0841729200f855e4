"""Options with a closed set of values: `--help` shows the values, and a refusal names the option and them."""

from typing import get_args

import pytest

from omnidraft.config import Mode, ModelSettings
from omnidraft.models.catalog.store import Source
from tests.cli_runs import run_cli

ENGINES = get_args(ModelSettings.model_fields["engine"].annotation)
CHOICES = [
    *((command, "--engine", ENGINES) for command in ("generate", "chat", "serve", "check")),
    *((command, "--quantize", ("int8", "int4")) for command in ("generate", "chat", "serve", "check")),
    *((command, "--mode", get_args(Mode)) for command in ("generate", "serve")),
    ("models pull", "--source", get_args(Source)),
]


@pytest.mark.parametrize(("command", "option", "choices"), CHOICES)
def test_choices_are_shown_and_named(
    command: str,
    option: str,
    choices: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = run_cli((*command.split(), "--help"), monkeypatch, capsys, {"COLUMNS": "200"}).stdout
    assert "|".join(choices) in shown
    refused = run_cli((*command.split(), option, "wild"), monkeypatch, capsys, {"COLUMNS": "200"})
    assert refused.returncode == 2
    assert all(word in refused.stderr for word in (option, "wild", *choices))
