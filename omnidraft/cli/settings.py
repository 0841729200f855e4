"""`omnidraft settings`: every setting with its value, its type, its default, what it does and what set it."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.cli.options import Config

if TYPE_CHECKING:
    from pydantic import BaseModel


def settings(
    name: Annotated[str, typer.Argument(help="Print only settings whose names contain this, such as `learner`.")] = "",
    effective: Annotated[
        bool, typer.Option("--effective", help="Print only what the file or the environment sets, a line each.")
    ] = False,
    config_file: Config = None,
) -> None:
    """Print the settings: values, types, defaults, meanings, and what set them."""
    from omnidraft.config import load, origins
    from omnidraft.errors import ConfigError

    set_by = origins(config_file)
    described = {setting.name: setting for setting in _settings(load(config_file))}
    found = [setting for setting in described.values() if name in setting.name]
    if not found:
        near = get_close_matches(name, {*described, *(each.rpartition(".")[2] for each in described)}, cutoff=0.5)
        raise ConfigError(f"no setting's name contains {name!r}" + (f"; near it: {', '.join(near)}" if near else ""))
    if not effective:
        print("\n".join(setting.described(set_by.get(setting.name)) for setting in found))
    elif lines := [f"{each}    # {set_by[each.name]}" for each in found if each.name in set_by]:
        print("\n".join(lines))
    else:
        print("neither a settings file nor the environment sets any of these: all have their defaults")


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    value: str
    type: str
    default: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value}"

    def described(self, set_by: str | None) -> str:
        """Return its lines."""
        origin = f"default {self.default}, set by {set_by}" if set_by else "the default"
        return "\n    ".join([str(self), f"({self.type}; {origin})", *([self.meaning] if self.meaning else [])])


def _settings(section: "BaseModel", prefix: str = "") -> Iterator[_Setting]:
    """Yield every setting; passwords are masked."""
    from pydantic import BaseModel

    for name, field in type(section).model_fields.items():
        value, full = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from _settings(value, f"{full}.")
            continue
        kind = " ".join([_type(field.annotation), *_bounds(field.metadata)])
        meaning = " ".join((field.description or "").split())
        yield _Setting(full, _shown(value), kind, _shown(field.get_default(call_default_factory=True)), meaning)


def _shown(value: Any) -> str:
    from omnidraft.config import masked

    return masked(repr(str(value) if isinstance(value, Path) else value))


def _type(annotation: Any) -> str:
    """Return a type as a settings file has it."""
    from types import NoneType, UnionType
    from typing import Literal, Union, get_args, get_origin

    kind, inside = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _type(inside[0])
    if kind is Literal:
        return " | ".join(map(repr, inside))
    if kind in (Union, UnionType):
        return " | ".join(_type(each) for each in inside if each is not NoneType)
    if kind is dict:
        return f"table of {_type(inside[1])}"
    if inside:
        return f"list of {_type(inside[0])}"
    name = annotation.__name__
    return {"SecretStr": "secret", "Path": "path", "ApiKey": "{key, tenant}"}.get(name, name)


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for sign, name in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
        for bound in metadata:
            if getattr(bound, name, None) is not None:
                yield f"{sign} {getattr(bound, name)}"
