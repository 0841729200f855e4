"""Model folders loaded with transformers, one at a time.

While transformers loads a model, torch's default floating type is the model's, in all threads. Two loads at once could
leave it so for good. What may run beside a load names the type of every tensor it makes.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from omnidraft.errors import ModelError, model_errors
from omnidraft.models.hf import quantised
from omnidraft.models.hf.tokenizer_cache import fast_tokenizer
from omnidraft.models.hf.tokenizer_json import GENERIC_CLASS

logger = logging.getLogger(__name__)
_OWN_FILES: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_REPORTED: Mapping[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}

default_dtype_lock = RLock()
"""Held while torch's default floating type may be another than float32, and by whoever has to rely on it."""


def causal_lm(folder: Path, **options: Any) -> PreTrainedModel:
    """Load the causal language model of a folder, never from a pickle, and never with code that lies there. Quantised
    weights become ordinary ones.

    Raises ModelError, also where weights are missing or an adapter lies beside them.
    """
    if (folder / "adapter_config.json").exists():
        raise ModelError(f"{folder} has an adapter beside its weights; merge it into them, or remove its files")
    transformers_logging.disable_progress_bar()
    with default_dtype_lock, _loading(folder):
        config = _config(folder)
        if (stored := quantised.stored_as(folder, config)) is None:
            quantised.require_ordinary(folder)
            read = {"use_safetensors": True, **_OWN_FILES, **_REPORTED, **options}
            model, report = _loader(config).from_pretrained(folder, **read)
            return _require_all(model, report, folder)
        logger.info("the weights of %s are %s: they are read once, as ordinary weights", folder.name, stored)
        return _dequantised(folder, config, **options)


def without_weights(folder: Path) -> PreTrainedModel:
    """Return the causal language model of a folder on no device, which has shapes alone. Raises ModelError."""
    with default_dtype_lock, _loading(folder):
        return _shapes(_config(folder))


def load_config(folder: Path) -> PreTrainedConfig:
    """Return the configuration of a folder's text model. Raises ModelError."""
    with _loading(folder):
        return _config(folder).get_text_config()


def _dequantised(folder: Path, config: PreTrainedConfig, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    """Return the model of a quantised folder. A weight is computed when it is taken; transformers frees it again."""
    weights, empty = quantised.ordinary_weights(folder, config), _shapes(config)
    if dtype == "auto":
        dtype = empty.config.get_text_config().dtype or torch.bfloat16
    if hasattr(empty.config, "quantization_config"):
        del empty.config.quantization_config
    loading: Any = type(empty)
    model, report = loading.from_pretrained(
        None, config=empty.config, state_dict=weights, dtype=dtype, **_REPORTED, **options
    )
    return _require_all(model, report, folder)


def _require_all(model: PreTrainedModel, report: Mapping[str, Any], source: Path) -> PreTrainedModel:
    """Return the model, or raise ModelError where the source has no weights for a part of it, which transformers fills
    at random. Parts that only images or sounds go through may lack theirs."""
    unread = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    encoders = {*model.base_model.parameters()} - {*model.get_decoder().parameters()}
    parameters = sorted(name for name, each in model.named_parameters() if name in unread and each not in encoders)
    if parameters:
        names = ", ".join(parameters[:3]) + (", ..." if parameters[3:] else "")
        raise ModelError(f"{source} has no weights that fit {names}: it is incomplete, or not of one model")
    return model


def _loading(folder: Path) -> AbstractContextManager[None]:
    return model_errors(f"{folder} is not a model folder that transformers can load")


def _config(folder: Path) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **_OWN_FILES)
    return config


def _shapes(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = _loader(config).from_config(config)
    return model


def _loader(config: PreTrainedConfig) -> Any:
    """Return the class that loads a model of text, or one of images and text."""
    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText


def saved_dtype(folder: Path) -> torch.dtype:
    """Return the format that a folder's weights are meant to be loaded in."""
    dtype = load_config(folder).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""The files of tokenizers that transformers knows; a folder has some of them."""
GENERATION = "generation_config.json"
"""The ids that end a text, and the sampling that the model's authors advise: they belong to the tokenizer too."""


_JSON, _CONFIG = "tokenizer.json", "tokenizer_config.json"


def write_folder(model: PreTrainedModel, tokenizer_folder: Path, folder: Path) -> None:
    """Write the model with the tokenizer of another folder. Raises ModelError, OSError, SafetensorError."""
    folder.mkdir()
    model.save_pretrained(folder)
    (folder / GENERATION).unlink(missing_ok=True)
    for name in (*TOKENIZER_FILES, GENERATION):
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    if _model_type(folder) != _model_type(tokenizer_folder):
        _keep_as_loaded(tokenizer_folder, folder)


def _keep_as_loaded(tokenizer_folder: Path, folder: Path) -> None:
    """Store the tokenizer as transformers loads it there: it rebuilds some by the model's type, another one here."""
    (folder / _JSON).write_text(fast_tokenizer(tokenizer_folder).backend_tokenizer.to_str(), encoding="utf-8")
    config = folder / _CONFIG
    known = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    saved = {key: value for key, value in known.items() if key not in ("is_local", "local_files_only")}
    config.write_text(json.dumps(saved | {"tokenizer_class": GENERIC_CLASS}, ensure_ascii=False), encoding="utf-8")


def _model_type(folder: Path) -> str | None:
    """Return the type of the model in a folder; None where there is a tokenizer alone."""
    config = folder / "config.json"
    known = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    model_type: str | None = known.get("model_type")
    return model_type
