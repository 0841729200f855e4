"""A model with another tokenizer: both vocabularies and all weights from their names, then training, then a folder."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from omnidraft.errors import ConfigError, RequestError
from omnidraft.files import require_empty, require_writable, sha256_of, whole_folder
from omnidraft.models.catalog import store
from omnidraft.models.hf.pretrained import saved_dtype, write_folder
from omnidraft.models.hf.trainable_drafter import automatic_precision, trainable_with_embeddings, usable_precision
from omnidraft.ports import Precision
from omnidraft.progress import bar
from omnidraft.transfer.bits_per_byte import bits_per_byte
from omnidraft.transfer.hypernetwork import LinearHypernetwork, save_hypernetworks
from omnidraft.transfer.initialisation import Method
from omnidraft.transfer.models import (
    HYPERNETWORK_FILE,
    TokenizerPair,
    frozen,
    goes_on,
    hypernetworks,
    initialised,
    load_model,
    load_pair,
)
from omnidraft.transfer.original_model import OriginalModel
from omnidraft.transfer.report import write_report
from omnidraft.transfer.run import Checkpoint, Point, train
from omnidraft.transfer.settings import TrainingSettings
from omnidraft.transfer.texts import AlignedText, align_text, read_texts
from omnidraft.transfer.trainer import Trainer

LORA_RANK: Final = 32


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """One transfer as a user asks for it."""

    model: str
    tokenizer: str
    data: tuple[Path, ...]
    out: Path
    settings: TrainingSettings
    init: Method | Path = "fvt"
    """How new rows begin, or the folder of another transfer of the model to begin with its hypernetwork and weights, or
    to go on from it where it has this tokenizer."""
    held_out_every: int = 16
    """One row in so many of each file is measured by, and never learned."""
    measure_every: int = 50
    """Steps between points of the curve, each of which is a checkpoint."""
    precision: Precision | None = None
    """The format of training passes; None: the fastest that this machine computes in."""
    with_gguf: bool = False
    """Whether a GGUF file is written beside the weights."""


def transfer(request: TransferRequest, on_point: Callable[[Point], None]) -> dict[str, Any]:
    """Transfer a model and write its folder, which appears whole or not at all; return the report.

    A run that was killed goes on from its last checkpoint, in OUT.parts, when it is started again.

    Raises:
        RequestError: the folder has something in it, or the texts cannot be used.
        ConfigError: settings contradict each other, a checkpoint is of another run, or a folder has no hypernetwork.
        ModelError: a model or tokenizer cannot be had or used.
        VocabularyError: a tokenizer cannot spell a text.
        StorageError: the disk is full, or cannot be written for another reason.
    """
    require_empty(request.out)
    require_writable(request.out)
    pair, out = load_pair(request.model, request.tokenizer), request.out.absolute()
    gguf_files: tuple[Path, Path] | None = None
    if request.with_gguf:
        from omnidraft.models.llamacpp import gguf_export

        gguf_files = store.gguf_path(request.model), store.gguf_path(request.tokenizer)
        gguf_export.require_writable(*gguf_files, len(pair.new.vocabulary))
    files = [_split_texts(path, pair, request) for path in request.data]
    learned, held_out = ([text for part in parts for text in part] for parts in zip(*files, strict=True))
    parts = out.with_name(f"{out.name}.parts")
    model, networks, report = _trained(request, pair, learned, held_out, parts, on_point)
    with whole_folder(out, str(request.out)) as partial:
        write_folder(model, pair.new_folder, partial)
        write_report(report, partial)
        save_hypernetworks(networks, partial / HYPERNETWORK_FILE)
        if gguf_files is not None:
            gguf_export.write_gguf(model, gguf_files[0], partial / f"{out.name}.gguf", tokenizer=gguf_files[1])
    shutil.rmtree(parts, ignore_errors=True)
    return report


def _split_texts(
    path: Path, pair: TokenizerPair, request: TransferRequest
) -> tuple[list[AlignedText], list[AlignedText]]:
    """Return the texts of a file to learn from, and those to measure by.

    Raises:
        RequestError: the file cannot be read, or one of the two has no text.
        VocabularyError: a tokenizer cannot spell a text.
    """
    texts, every = read_texts(path, pair.new.vocabulary), request.held_out_every
    learned: list[AlignedText] = []
    held_out: list[AlignedText] = []
    with bar(f"tokenising {path.name}", len(texts), transient=True) as advance:
        for number, text in enumerate(texts, 1):
            aligned = align_text(text, pair.old, pair.new, request.settings.max_tokens)
            if aligned.num_bytes:
                (learned if number % every else held_out).append(aligned)
            advance()
    if not learned or not held_out:
        raise RequestError(f"{path}: {len(texts)} texts are too few to hold out one in {every}")
    return learned, held_out


def _trained(
    request: TransferRequest,
    pair: TokenizerPair,
    learned: list[AlignedText],
    held_out: list[AlignedText],
    parts: Path,
    on_point: Callable[[Point], None],
) -> tuple[Any, list[LinearHypernetwork], dict[str, Any]]:
    """Return the trained model in the format of the original's weights, its hypernetworks, and the report."""
    settings = request.settings
    precision = usable_precision(request.precision) if request.precision else automatic_precision()
    original_model = load_model(pair.old_folder, request.model)
    folder = request.init if isinstance(request.init, Path) else None
    networks = hypernetworks(original_model, pair, folder)
    run = _identity(request, pair, [*learned, *held_out], precision)
    checkpoint = Checkpoint(parts / "checkpoint.safetensors", run)
    before = frozen(original_model, precision)
    if settings.max_tokens > before.context_limit:
        raise ConfigError(f"{request.model} reads {before.context_limit} tokens, texts may have {settings.max_tokens}")
    original_bits = bits_per_byte(before, held_out, "old")
    init = folder or ("fvt" if checkpoint.file.exists() else request.init)  # a checkpoint has its own rows
    model = initialised(request.model, init, pair)
    after = trainable_with_embeddings(
        model, train=settings.train, rank=LORA_RANK, seed=settings.seed, precision=precision
    )
    original = OriginalModel(before, pair.old.vocabulary, pair.new.vocabulary, settings.alm)
    trainer = Trainer(after, original, learned, settings, networks)
    curve = train(
        trainer,
        checkpoint,
        lambda: bits_per_byte(after, held_out, "new"),
        num_steps=settings.num_steps,
        measure_every=request.measure_every,
        on_point=on_point,
    )
    saved, dtype = after.into_model(), saved_dtype(pair.old_folder)
    for parameter in saved.parameters():  # not the frequencies of rotary embeddings, which no folder has
        parameter.data = parameter.data.to(dtype).float()
    scored = frozen(saved, precision)
    trained_bits = bits_per_byte(scored, held_out, "new")
    name = request.init if folder is None else "continued" if goes_on(folder, pair) else "hypernetwork"
    report = {
        "run": checkpoint.run,
        "bits_per_byte": {"original": original_bits, name: curve[0].bits_per_byte, "trained": trained_bits},
        "num_texts": len(learned),
        "num_held_out": len(held_out),
        "held_out_bytes": sum(text.num_bytes for text in held_out),
        "curve": [asdict(point) for point in curve],
    }
    return scored.into_model().to(dtype), networks, report  # type: ignore[arg-type]


def _identity(
    request: TransferRequest, pair: TokenizerPair, texts: Sequence[AlignedText], precision: Precision
) -> dict[str, Any]:
    """Return what decides the result of a run, as plain data."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.new_ids_T.tobytes())
    return {
        "model": request.model,
        "tokenizer": request.tokenizer,
        "alignment": pair.alignment.fingerprint,
        "texts": digest.hexdigest(),
        "held_out_every": request.held_out_every,
        "init": request.init if isinstance(request.init, str) else sha256_of(request.init / HYPERNETWORK_FILE),
        "precision": precision,
        **asdict(request.settings),
        "losses": dict(request.settings.losses),
    }
