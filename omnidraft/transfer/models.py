"""The models and vocabularies of a transfer, from their names; new rows for embeddings and head."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omnidraft.errors import ModelError
from omnidraft.files import whole_folder
from omnidraft.models.catalog import store
from omnidraft.models.hf.pretrained import TOKENIZER_FILES, causal_lm
from omnidraft.models.hf.target_vocabulary import replace_vocabulary
from omnidraft.models.hf.tokenizer import HfTokenizer, load_tokenizer, write_byte_tokenizer
from omnidraft.models.hf.trainable_drafter import TransformersTrainable
from omnidraft.ports import Precision
from omnidraft.progress import bar
from omnidraft.system import default_home
from omnidraft.transfer.hypernetwork import LinearHypernetwork, load_hypernetworks
from omnidraft.transfer.initialisation import Method, average_rows, fvt_rows, omp_rows
from omnidraft.transfer.texts import TextTokenizer
from omnidraft.vocab.alignment import Alignment, align_cached

BYTES = "bytes"
"""Names the tokenizer whose tokens are single bytes."""
HYPERNETWORK_FILE = Path("hypernetwork", "weights.safetensors")
"""In the folder of a transferred model. Engines take each weights file at the top of a folder for one of the model."""


@dataclass(frozen=True, slots=True)
class TokenizerPair:
    """The folders of a model and of the tokenizer that it gets, and the alignment of both vocabularies."""

    old_folder: Path
    new_folder: Path
    old: TextTokenizer
    new: TextTokenizer
    alignment: Alignment


def load_pair(model: str, tokenizer: str) -> TokenizerPair:
    """Load both tokenizers, fetching models that are not installed. Raises ModelError."""
    old_folder = store.resolve(model)
    old = _tokenizer(old_folder)
    new_folder = _byte_tokenizer(old_folder) if tokenizer == BYTES else _tokenizer_folder(tokenizer)
    new = _tokenizer(new_folder)
    return TokenizerPair(
        old_folder,
        new_folder,
        TextTokenizer.of(old, old.prompt_ids(""), model),
        TextTokenizer.of(new, new.prompt_ids(""), tokenizer),
        align_cached(old, new, default_home() / "alignments"),
    )


def load_model(folder: Path, name: str) -> Any:
    """Load the model of a folder in float32. Raises ModelError."""
    try:
        return causal_lm(folder, dtype=torch.float32).eval()
    except ModelError as exc:
        raise ModelError(f"{name} cannot be loaded: {exc}") from exc


def frozen(model: Any, precision: Precision = "float32") -> TransformersTrainable:
    """Return a model to score texts with; it learns nothing."""
    return TransformersTrainable(model.requires_grad_(False), precision)


def initialised(model: str, init: Method | Path, pair: TokenizerPair) -> Any:
    """Load a model and give it the new vocabulary; tied matrices stay tied.

    Args:
        init: how new rows are made, or the folder of another transfer of this model, with any tokenizer: then its
            hypernetwork makes them, and all other weights are those of the folder. With this very tokenizer they are
            the folder's as well.

    Raises:
        ModelError: a model cannot be had or used.
        ConfigError: the folder has no hypernetwork of this model.
    """
    made = load_model(pair.old_folder, model)
    old = matrices(made)
    match init:
        case "fvt":
            rows = [fvt_rows(old_DH, pair.alignment) for old_DH in old]
        case "mean":
            rows = [average_rows(old_DH, pair.alignment) for old_DH in old]
        case "omp":
            rows = _pursued(old, pair)
        case folder:
            networks = hypernetworks(made, pair, folder)
            made = load_model(folder, str(folder))
            if goes_on(folder, pair):
                return made
            rows = [fvt_rows(old_DH, pair.alignment) + net.added() for old_DH, net in zip(old, networks, strict=True)]
    replace_vocabulary(made, rows[0], rows[-1], pair.new.vocabulary)
    return made


def goes_on(folder: Path, pair: TokenizerPair) -> bool:
    """Return whether the rows of the model of a folder are for the ids of the new tokenizer. Raises ModelError."""
    own, new = _tokenizer(folder).vocabulary, pair.new.vocabulary
    return (own.token_bytes, own.special_ids) == (new.token_bytes, new.special_ids)


def hypernetworks(model: Any, pair: TokenizerPair, folder: Path | None = None) -> list[LinearHypernetwork]:
    """Return one for the embeddings of the model before, and one for its head where that is another matrix.

    Args:
        folder: of the transfer that their weights are from; None: they add nothing.

    Raises:
        ConfigError: the folder has none of this model.
    """
    networks = [LinearHypernetwork(old_DH, pair.alignment.drafts_of_target) for old_DH in matrices(model)]
    if folder is not None:
        load_hypernetworks(networks, folder / HYPERNETWORK_FILE)
    return networks


def matrices(model: Any) -> list[Tensor]:
    """Return the embeddings, and the head where it is another matrix."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    return [embedding.weight] if head.weight is embedding.weight else [embedding.weight, head.weight]


def _byte_tokenizer(folder: Path) -> Path:
    """Return a folder with the tokenizer of bytes for the model of a folder; write it if it is absent. Two models of
    the same tokens may have other special tokens and templates, which are in these files."""
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    states = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    made = default_home() / "byte-tokenizers" / hashlib.sha256(repr(states).encode()).hexdigest()[:16]
    if not made.is_dir():
        with whole_folder(made, "the tokenizer of bytes") as partial:
            write_byte_tokenizer(folder, partial)
    return made


def _tokenizer_folder(name: str) -> Path:
    """Return a folder with a tokenizer, which needs no model beside it. Raises ModelError."""
    local = Path(name).expanduser()
    return local if (local / "tokenizer.json").is_file() else store.resolve_tokenizer(name)


def _tokenizer(folder: Path) -> HfTokenizer:
    """Load the tokenizer of a folder, with as many ids as the head of the model in it, if there is one."""
    cache = default_home() / "tokenizers"
    if not (folder / "config.json").is_file():
        return HfTokenizer(folder, cache=cache)
    return load_tokenizer(folder, cache)


def _pursued(old: Sequence[Tensor], pair: TokenizerPair) -> list[Tensor]:
    """Make both matrices by matching pursuit, each in the same matrix of the model that the tokenizer comes from."""
    donor = matrices(load_model(pair.new_folder, f"{pair.new_folder}, whose embeddings omp needs,"))
    if len(donor[0]) < pair.alignment.num_target:
        raise ModelError(f"{pair.new_folder} has {len(donor[0])} embeddings for {pair.alignment.num_target} ids")
    num_made = len(old) * int((pair.alignment.drafts_of_target.lengths > 1).sum())
    with bar("matching pursuit", num_made) as advance:
        return [
            omp_rows(old_DH, donor[min(number, len(donor) - 1)], pair.alignment, advance=advance)
            for number, old_DH in enumerate(old)
        ]
