"""Settings files and environments of an earlier release load with all their values."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from omnidraft import config
from omnidraft.wiring.recording import redactor
from tests.migration.earlier_release import DATA, expected

WITHOUT_EFFECT = {"learner.max_lag_records", "learner.lag_sample_records"}
"""Settings that may still be given although nothing reads them any more."""
CHANGED = {"learner.learning_rate": "auto"}
"""Defaults that are not those of the earlier release: 1e-4 made drafters with small weights forget what they knew."""

REFUSED = {"models.precision": "auto"}
"""What is given instead of a value with which no worker of that release started: it has llama.cpp run int4."""


def revealed(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return every setting under its dotted name, secrets as they were given."""
    if isinstance(value, BaseModel):
        found: dict[str, Any] = {}
        for name in type(value).model_fields:
            found |= revealed(getattr(value, name), f"{prefix}.{name}")
        return found
    return {prefix.removeprefix("."): _plain(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def dotted(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return the saved sections under the same names; a table that is one setting's value stays whole."""
    if isinstance(values, dict) and prefix != ".learner.ray_resources":
        found: dict[str, Any] = {}
        for name, value in values.items():
            found |= dotted(value, f"{prefix}.{name}")
        return found
    return {prefix.removeprefix("."): values}


def loaded_as(settings: config.Settings, values: Any) -> None:
    """Fail unless the settings have all these values."""
    now, then = revealed(settings), dotted(values)
    missing = then.keys() - now.keys()
    assert missing <= WITHOUT_EFFECT
    assert {name: now[name] for name in then.keys() - missing} == {
        name: value for name, value in then.items() if name not in missing
    }


def test_a_file_with_every_setting_loads_with_all_values() -> None:
    settings = config.load(DATA / "settings.toml", {}, models={"precision": "auto"})
    loaded_as(settings, dotted(expected("settings.json")["values"]) | REFUSED)


def test_an_environment_with_every_setting_loads_with_all_values() -> None:
    settings = config.load(None, expected("environ.json")["every"], models={"precision": "auto"})
    loaded_as(settings, dotted(expected("settings.json")["values"]) | REFUSED)


def test_the_environment_still_wins_over_the_file_and_short_names_over_both() -> None:
    short = expected("environ.json")["short"]
    environ = short | {"OMNIDRAFT_LEARNER__SEED": "11"}
    settings = config.load(DATA / "settings.toml", environ, models={"precision": "auto"})
    assert settings.log.url == short["OMNIDRAFT_LOG"]
    assert settings.registry.url == short["MLFLOW_TRACKING_URI"]
    assert settings.tracing.endpoint == short["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert settings.learner.seed == 11


def test_every_default_is_the_same_but_for_those_that_did_harm() -> None:
    loaded_as(config.Settings(), dotted(expected("settings.json")["defaults"]) | CHANGED)


@pytest.mark.parametrize("name", ["hashed_tenant", "without_prompts"])
def test_a_redactor_is_found_under_the_name_that_settings_give_it(name: str) -> None:
    settings = config.load(None, {"OMNIDRAFT_RECORDER__REDACTOR": f"omnidraft.traces.redaction:{name}"})
    assert callable(redactor(settings))
