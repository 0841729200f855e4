"""The mean of models that `omnidraft transfer` gave the same tokenizer, as one folder.

`python -m pipelines.transfer_mean FOLDER FOLDER --out DIR`. A transfer that went on from another one, with other texts,
forgets some of what that one knew; the mean of both weights was as good as the better one on each kind of text that we
tried, or better.
Source: https://arxiv.org/abs/2109.01903 and https://arxiv.org/abs/2203.05482.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnidraft.errors import RequestError
from omnidraft.hosts import process
from omnidraft.output_files import require_writable
from omnidraft.progress import bar
from omnidraft.snapshots.files import whole_folder
from omnidraft.transfer.report import JSON_FILE
from omnidraft.wiring.export import require_empty
from omnidraft.wiring.transfer_models import HYPERNETWORK_FILE, load_model
from pipelines.lib import report
from pipelines.lib.held_out_rows import held_out_alike

if TYPE_CHECKING:
    from torch import Tensor


def main(
    folders: Annotated[list[Path], typer.Argument(help="Folders that omnidraft transfer wrote: two or more.")],
    out: Annotated[Path, typer.Option(help="The folder to write; nothing may be in it.")],
) -> None:
    """Write the mean of transferred models of one shape and one tokenizer."""
    require_empty(out)
    require_writable(out)
    if len(folders) < 2:
        raise RequestError("a mean is of two folders or more")
    run = held_out_alike(folders)
    _require_one_tokenizer(folders)
    model = _mean_model(folders)
    with whole_folder(out.absolute(), str(out)) as partial:
        _write(model, folders, partial)
        report.save({"run": run | {"mean_of": [str(folder) for folder in folders]}}, partial / JSON_FILE)


def _require_one_tokenizer(folders: Sequence[Path]) -> None:
    first, *others = ((folder / "tokenizer.json").read_bytes() for folder in folders)
    for folder, other in zip(folders[1:], others, strict=True):
        if other != first:
            raise RequestError(f"{folder} has another tokenizer than {folders[0]}")


def _mean_model(folders: Sequence[Path]) -> Any:
    """Return the first model, in float32, with the mean of all weights. Raises ModelError, RequestError."""
    model = _frozen(folders[0])
    _add_others(dict(model.named_parameters()), folders, lambda folder: dict(_frozen(folder).named_parameters()))
    return model


def _frozen(folder: Path) -> Any:
    return load_model(folder, str(folder)).requires_grad_(False)


def _add_others(
    mean: "dict[str, Tensor]", folders: Sequence[Path], load: "Callable[[Path], Mapping[str, Tensor]]"
) -> None:
    """Turn the weights of the first folder into the mean of all, in place. Raises RequestError."""
    with bar("adding weights", len(folders) - 1, transient=True) as advance:
        for number, folder in enumerate(folders[1:], 2):
            more = load(folder)
            if {name: each.shape for name, each in mean.items()} != {name: each.shape for name, each in more.items()}:
                raise RequestError(f"{folder} is a model of another shape")
            for name, each in mean.items():
                each.lerp_(more[name].to(each.dtype), 1 / number)
            advance()


def _write(model: Any, folders: Sequence[Path], partial: Path) -> None:
    from omnidraft.models.hf.model_folder import write_folder
    from omnidraft.models.hf.pretrained import saved_dtype

    write_folder(model.to(saved_dtype(folders[0])), folders[0], partial)
    if all((folder / HYPERNETWORK_FILE).exists() for folder in folders):
        _write_mean_network(folders, partial / HYPERNETWORK_FILE)


def _write_mean_network(folders: Sequence[Path], file: Path) -> None:
    """The rows are linear in a hypernetwork's weights, so the mean of these goes with the mean of the rows."""
    from safetensors.torch import load_file, save_file

    mean = load_file(folders[0] / HYPERNETWORK_FILE)
    _add_others(mean, folders, lambda folder: load_file(folder / HYPERNETWORK_FILE))
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(mean, file)


if __name__ == "__main__":
    process.entry("transfer_mean", main)
