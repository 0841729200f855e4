"""`omnidraft config`: every setting with its value and what it does."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.cli.options import Config

if TYPE_CHECKING:
    from pydantic import BaseModel


def config(
    beginning: Annotated[str, typer.Argument(help="Print only settings that begin so, such as `learner`.")] = "",
    config_file: Config = None,
) -> None:
    """Print the settings, each with its value and what it does."""
    from omnidraft.config import load

    print("\n".join(_described(load(config_file), beginning)))


def _described(section: "BaseModel", beginning: str, prefix: str = "") -> Iterator[str]:
    """Yield the lines of each setting; passwords are masked."""
    from pydantic import BaseModel

    from omnidraft.config import masked

    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _described(value, beginning, f"{prefix}{name}.")
        elif f"{prefix}{name}".startswith(beginning):
            yield f"{prefix}{name} = {masked(repr(str(value) if isinstance(value, Path) else value))}"
            if field.description:
                yield f"    {' '.join(field.description.split())}"
