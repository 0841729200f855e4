"""The operator's redactor, from its name in the settings."""

from importlib import import_module
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.errors import ConfigError

if TYPE_CHECKING:
    from omnidraft.decode.recording.redactor import Redactor


def redactor(settings: Settings) -> "Redactor | None":
    """None: records are written as they are. Raises ConfigError when there is no such function."""
    named = settings.recorder.redactor
    if named is None:
        return None
    module_name, _, name = named.partition(":")
    try:
        found = getattr(import_module(module_name), name)
    except ImportError as exc:
        raise ConfigError(f"recorder.redactor = {named!r}: {exc}; is it on the Python path?") from exc
    except AttributeError as exc:
        raise ConfigError(f"recorder.redactor = {named!r}: {exc}") from exc
    except Exception as exc:  # not our code: importing it may raise anything
        raise ConfigError(f"recorder.redactor = {named!r}: importing it raised {type(exc).__name__}: {exc}") from exc
    if not callable(found):
        raise ConfigError(f"recorder.redactor = {named!r} is a {type(found).__name__}, not a function")
    made: Redactor = found
    return made
