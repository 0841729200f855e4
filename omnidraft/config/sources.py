"""The sources of settings: one TOML file, then addresses and overrides from the environment.

Environment: `OMNIDRAFT_LOG`, `MLFLOW_TRACKING_URI`, `OTEL_EXPORTER_OTLP_ENDPOINT` and `RAY_ADDRESS` (read by Ray
itself) are the addresses of external services; any other setting is `OMNIDRAFT_<SECTION>__<FIELD>`, for example
`OMNIDRAFT_LEARNER__LEARNING_RATE=2e-5`.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from omnidraft.config.secrets import holds_secret, masked
from omnidraft.config.sections import Settings
from omnidraft.errors import ConfigError, SettingsUnreadable

_SHORT_NAMES = {
    "OMNIDRAFT_LOG": "log__url",
    "MLFLOW_TRACKING_URI": "registry__url",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "tracing__endpoint",
}
"""Variables for the addresses of external services."""
_PREFIX = "OMNIDRAFT_"
_MOST_NAMED = 5
"""As many wrong settings are named in one error."""


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
    given: dict[str, Any] = {
        section: {k: v for k, v in fields.items() if v is not None} for section, fields in overrides.items()
    }
    environ = os.environ if environ is None else environ
    loaded = _sources(path, environ)
    try:
        return Settings(**dict(loaded(**given)))
    except ValidationError as exc:
        raise ConfigError(_problems(exc)) from exc
    except FileNotFoundError as exc:
        raise SettingsUnreadable(f"no settings file at {path}") from exc
    except OSError as exc:
        raise SettingsUnreadable(f"{path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingsUnreadable(f"{path} is not TOML: {exc}") from exc
    except SettingsError:
        names = ", ".join(_not_json(loaded, environ))
        form = 'lists and tables are given as JSON, for example \'["a", "b"]\''
        raise ConfigError(f"setting {names}: not JSON: {form}") from None


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are neither settings nor addresses of external services: with them alone, a process
    does what its file says."""
    return {name: value for name, value in environ.items() if not _is_setting(name)}


def _is_setting(name: str) -> bool:
    return name in _SHORT_NAMES or name == "RAY_ADDRESS" or ("__" in name and name.upper().startswith(_PREFIX))


def _sources(path: Path | None, environ: Mapping[str, str]) -> type[BaseSettings]:
    """Return the class that builds the settings from this file and this environment."""

    class Loaded(Settings, BaseSettings):
        model_config = SettingsConfigDict(env_prefix=_PREFIX, env_nested_delimiter="__")

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            *_: PydanticBaseSettingsSource,
            **__: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, _Environment(settings_cls, environ), _TomlFile(settings_cls, path)

    return Loaded


class _Environment(EnvSettingsSource):
    """Reads OMNIDRAFT_<SECTION>__<FIELD>, and the addresses with a short name."""

    def __init__(self, settings_cls: type[BaseSettings], environ: Mapping[str, str]) -> None:
        super().__init__(settings_cls)
        self.env_vars = {name.lower(): value for name, value in environ.items() if "__" in name}
        for name, field in _SHORT_NAMES.items():
            if name in environ:
                self.env_vars[self.env_prefix.lower() + field] = environ[name]

    def __call__(self) -> dict[str, Any]:
        return {**self._unknown_sections(), **super().__call__()}

    def _unknown_sections(self) -> dict[str, Any]:
        """Return misspelt sections, which validation then refuses."""
        prefix = self.env_prefix.lower()
        names = [name.removeprefix(prefix).split("__")[0] for name in self.env_vars if name.startswith(prefix)]
        return {name: {} for name in names if name not in self.settings_cls.model_fields}


def _not_json(settings_cls: type[BaseSettings], environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the variables whose setting is a list or a table, and whose value is not JSON."""
    for name, value in environ.items():
        try:
            _Environment(settings_cls, {name: value})()
        except SettingsError:
            yield name


class _TomlFile(TomlConfigSettingsSource):
    """Reads the settings file; unlike its base class it raises when the file is missing."""

    def __init__(self, settings_cls: type[BaseSettings], path: Path | None) -> None:
        if path is not None and path.is_dir():
            raise SettingsUnreadable(f"{path} is a folder, not a settings file")
        if path is not None and not path.is_file():
            raise FileNotFoundError(path)
        super().__init__(settings_cls, path)


def _problems(exc: ValidationError) -> str:
    """Return one line that names the first wrong settings, and how many more there are."""
    named = "; ".join(map(_problem, exc.errors()[:_MOST_NAMED]))
    more = exc.error_count() - _MOST_NAMED
    return f"{named} (and {more} more)" if more > 0 else named


def _problem(problem: ErrorDetails) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"setting {where}: there is no such setting"
    what = problem["msg"].removeprefix("Value error, ")
    if holds_secret(Settings, problem["loc"]):
        return f"setting {where}: {what}"
    return f"setting {where}: {what}, got {masked(repr(problem.get('input')))}"
