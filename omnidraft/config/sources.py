"""The sources of settings: one TOML file, then addresses and overrides from the environment.

Environment: `OMNIDRAFT_LOG`, `MLFLOW_TRACKING_URI`, `OTEL_EXPORTER_OTLP_ENDPOINT` and `RAY_ADDRESS` (read by Ray
itself) are the addresses of external services; any other setting is `OMNIDRAFT_<SECTION>__<FIELD>`, for example
`OMNIDRAFT_LEARNER__LEARNING_RATE=2e-5`.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from omnidraft.config.secrets import holds_secret, masked
from omnidraft.config.sections import Settings
from omnidraft.errors import ConfigError, SettingsUnreadable, did_you_mean

_SHORT_NAMES = {
    "OMNIDRAFT_LOG": "log__url",
    "MLFLOW_TRACKING_URI": "registry__url",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "tracing__endpoint",
}
"""Variables for the addresses of external services."""
_PREFIX = "OMNIDRAFT_"
_MOST_NAMED = 5
"""As many wrong settings are named in one error."""

Sections = dict[str, Any]


def load(path: Path | None = None, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Load settings from a TOML file, then the environment, then `overrides` (section=dict); the last one wins.

    An override that is None is ignored.

    Raises:
        SettingsUnreadable: the file is missing or not TOML.
        ConfigError: a setting is unknown or out of range.
    """
    for section, fields in overrides.items():
        if not isinstance(fields, Mapping):
            example = 'a section is a dict, for example decode={"mode": "reproducible"}'
            raise ConfigError(f"{section} = {fields!r} is no section of settings: {example}")
    given = {section: {k: v for k, v in fields.items() if v is not None} for section, fields in overrides.items()}
    told = _merged(_file(path), _environment(os.environ if environ is None else environ))
    try:
        return Settings.model_validate(_merged(told, given))
    except ValidationError as exc:
        raise ConfigError(_problems(exc)) from exc


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are neither settings nor addresses of external services: with them alone, a process
    does what its file says."""
    kept = {*environ} - {*_SHORT_NAMES, "RAY_ADDRESS"}
    return {name: value for name, value in environ.items() if name in kept and not _is_setting(name)}


def origins(path: Path | None = None, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what set each setting and section that is set: the settings file's path or a variable's name, by the
    setting's full name. Raises as `load`."""
    environ = os.environ if environ is None else environ
    found = dict.fromkeys(_names(_file(path)), str(path))
    for variable in _variables(environ):
        found |= dict.fromkeys(_names(_environment({variable: environ[variable]})), variable)
    return found


def _names(sections: Sections, prefix: str = "") -> Iterator[str]:
    for name, value in sections.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the setting of each variable that is one; the later wins, so an address with a short name."""
    settings = {name: name.lower().removeprefix(_PREFIX.lower()) for name in environ if _is_setting(name)}
    return settings | {name: setting for name, setting in _SHORT_NAMES.items() if name in environ}


def _is_setting(name: str) -> bool:
    return "__" in name and name.upper().startswith(_PREFIX)


def _file(path: Path | None) -> Sections:
    if path is None:
        return {}
    if path.is_dir():
        raise SettingsUnreadable(f"{path} is a folder, not a settings file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise SettingsUnreadable(f"no settings file at {path}") from exc
    except OSError as exc:
        raise SettingsUnreadable(f"{path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingsUnreadable(f"{path} is not TOML: {exc}") from exc


def _environment(environ: Mapping[str, str]) -> Sections:
    """Return what the variables say; lists and tables are JSON."""
    told, wrong = Sections(), []
    for name, setting in _variables(environ).items():
        value: Any = environ[name]
        path = setting.split("__")
        try:
            value = json.loads(value) if _is_json(path) else value
        except json.JSONDecodeError:
            wrong.append(name)
        for section in reversed(path):
            value = {section: value}
        told = _merged(told, value)
    if wrong:
        form = 'lists and tables are given as JSON, for example \'["a", "b"]\''
        raise ConfigError(f"setting {', '.join(wrong)}: not JSON: {form}")
    return told


def _is_json(path: list[str]) -> bool:
    """Return whether the setting at this path is a list, a table or a section."""
    kind = _kind(path)
    return get_origin(kind) in (tuple, frozenset, dict) or hasattr(kind, "model_fields")


def _kind(path: Iterable[str | int]) -> Any:
    """Return the type of the setting or section at this path; None: there is none."""
    kind: Any = Settings
    for name in path:
        field = _fields(kind).get(name)
        kind = field and field.annotation
    return kind


def _fields(kind: Any) -> dict[Any, Any]:
    """Return the fields of a section by their names; none of anything else."""
    return getattr(kind, "model_fields", {})


def _merged(first: Sections, second: Sections) -> Sections:
    """Return the sections of both, field by field; the second wins."""
    merged = dict(first)
    for name, value in second.items():
        own = merged.get(name)
        merged[name] = _merged(own, value) if isinstance(own, dict) and isinstance(value, dict) else value
    return merged


def _problems(exc: ValidationError) -> str:
    """Return one line that names the first wrong settings, and how many more there are."""
    named = "; ".join(map(_problem, exc.errors()[:_MOST_NAMED]))
    more = exc.error_count() - _MOST_NAMED
    return f"{named} (and {more} more)" if more > 0 else named


def _problem(problem: ErrorDetails) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        siblings = _fields(_kind(problem["loc"][:-1]))
        return f"setting {where}: there is no such setting{did_you_mean(str(problem['loc'][-1]), siblings)}"
    what = problem["msg"].removeprefix("Value error, ")
    if holds_secret(Settings, problem["loc"]):
        return f"setting {where}: {what}"
    return f"setting {where}: {what}, got {masked(repr(problem.get('input')))}"
