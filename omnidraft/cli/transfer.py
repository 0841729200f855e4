"""`omnidraft transfer`: a model with another tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from omnidraft.cli.options import download_bars

if TYPE_CHECKING:
    from omnidraft.transfer.initialisation import Method
    from omnidraft.transfer.run import Point


def transfer(
    model: Annotated[str, typer.Argument(help="The model: a name, folder or hub id.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer", help="The model, or a folder, whose tokenizer it gets; or bytes.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; nothing may be in it.", show_default=False)],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            help="JSON lines to learn from, but for rows of a split other than train; may be given again.",
            show_default=False,
        ),
    ],
    init: Annotated[str, typer.Option(metavar="fvt|omp|mean|FOLDER", help="How new tokens begin; see above.")] = "fvt",
    num_steps: Annotated[int, typer.Option(min=0, help="Steps of training; 0 initialises only.")] = 400,
    learning_rate: Annotated[
        float | None,
        typer.Option(min=0, help="The highest; it rises to it, and falls to 0. By itself: by the size of the weights."),
    ] = None,
    train: Annotated[
        Literal["full", "lora"], typer.Option(help="All weights; or factors, embeddings and head.")
    ] = "full",
    max_tokens: Annotated[int, typer.Option(min=2, help="The most tokens of a text; the rest is left out.")] = 256,
    held_out_every: Annotated[int, typer.Option(min=2, help="One text in so many measures, and is not learned.")] = 16,
    gguf: Annotated[bool, typer.Option("--gguf", help="Write a GGUF file into the folder too.")] = False,
) -> None:
    """Give a model another tokenizer: new embeddings, then training by the model as it was.

    \b
    omnidraft transfer smollm2-135m --tokenizer qwen2.5-coder-0.5b \\
      --data answers.jsonl --out transferred

    A token that both tokenizers have keeps its embedding. Any other begins with the mean of those of its old pieces
    (fvt), with the same sum of shared tokens that makes it in the embeddings of the model that the tokenizer comes from
    (omp: needs that model's weights), or with the mean of all embeddings (mean: for comparisons). With the FOLDER of
    another transfer of this model, to any tokenizer, it begins with what that one learned: its hypernetwork makes all
    embeddings, and the other weights are its own; with the same tokenizer all are its own, and training goes on. Then
    the likelihoods of the same bytes, and the hidden states behind them, learn to be what they were before. Tokens that
    no text has learn too, by a linear map of the old pieces' embeddings, a small hypernetwork.

    A line of the data has a prompt or question, and maybe answer, reference or answer_ids (ids of the new tokenizer).

    Bits per byte of the held-out texts compare the model before and after, whatever their tokenizers. OUT is a folder
    that transformers loads, with transfer.json and transfer.png about the run. A run that was killed goes on from its
    last checkpoint (OUT.parts) when it is started again with the same options.
    """
    from omnidraft.models.catalog import store
    from omnidraft.transfer.models import BYTES
    from omnidraft.transfer.settings import TrainingSettings
    from omnidraft.transfer.transfer import TransferRequest
    from omnidraft.transfer.transfer import transfer as run_transfer

    settings = TrainingSettings(num_steps, learning_rate=learning_rate, train=train, max_tokens=max_tokens)
    request = TransferRequest(model, tokenizer, tuple(data), out, settings, _init(init), held_out_every, with_gguf=gguf)
    with download_bars() as progress:
        for name, resolve in ((model, store.resolve), (tokenizer, store.resolve_tokenizer)):
            if name != BYTES and not Path(name).is_dir():
                resolve(name, progress=progress)
    report = run_transfer(request, _print_point)
    for name, bits in report["bits_per_byte"].items():
        print(f"{name:10} {bits:.4f} bits per byte")
    print(f"wrote {out}")


def _init(given: str) -> "Method | Path":
    from omnidraft.transfer.initialisation import Method

    if given in get_args(Method):
        return cast(Method, given)
    if not Path(given).is_dir():
        raise typer.BadParameter(
            f"{given} is none of {', '.join(get_args(Method))}, and no folder", param_hint="--init"
        )
    return Path(given)


def _print_point(point: "Point") -> None:
    losses = "".join(f", {name} {value:.4g}" for name, value in (point.losses or {}).items())
    rate = f", learning rate {point.learning_rate:.2g}" if point.losses else ""
    typer.echo(
        f"step {point.step}: {point.bits_per_byte:.4f} bits per byte{losses}{rate}, {point.num_tokens} tokens", err=True
    )
