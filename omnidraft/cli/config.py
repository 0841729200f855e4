"""`omnidraft config`: every setting with its value and what it does."""

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.cli.options import Config

if TYPE_CHECKING:
    from pydantic import BaseModel


def config(
    name: Annotated[str, typer.Argument(help="Print only settings whose names contain this, such as `learner`.")] = "",
    config_file: Config = None,
) -> None:
    """Print the settings, each with its value and what it does."""
    from omnidraft.config import load
    from omnidraft.errors import ConfigError

    described = dict(_described(load(config_file)))
    found = [lines for setting, lines in described.items() if name in setting]
    if not found:
        near = get_close_matches(name, {*described, *(each.rpartition(".")[2] for each in described)}, cutoff=0.5)
        raise ConfigError(f"no setting's name contains {name!r}" + (f"; near it: {', '.join(near)}" if near else ""))
    print("\n".join(found))


def _described(section: "BaseModel", prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name of each setting and its lines; passwords are masked."""
    from pydantic import BaseModel

    from omnidraft.config import masked

    for name, field in type(section).model_fields.items():
        value, full = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from _described(value, f"{full}.")
            continue
        shown = f"{full} = {masked(repr(str(value) if isinstance(value, Path) else value))}"
        yield full, "\n    ".join([shown, *([" ".join(field.description.split())] if field.description else [])])
