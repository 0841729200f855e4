"""Model folders loaded with transformers, one at a time.

While transformers loads a model, torch's default floating type is the model's, in all threads. Two loads at once could
leave it so for good. What may run beside a load names the type of every tensor it makes.
"""

from pathlib import Path
from threading import RLock
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from omnidraft.errors import ModelError

default_dtype_lock = RLock()
"""Held while torch's default floating type may be another than float32, and by whoever has to rely on it."""


def causal_lm(folder: Path, **options: Any) -> PreTrainedModel:
    """Load the causal language model of a folder, never from a pickle. Raises what `from_pretrained` raises."""
    transformers_logging.disable_progress_bar()
    with default_dtype_lock:
        return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
            folder, local_files_only=True, use_safetensors=True, **options
        )


def require_unquantised(model: PreTrainedModel, folder: Path) -> None:
    """Raise ModelError where weights are levels of a quantisation, which are no weights without their steps."""
    quantised = {
        str(each.dtype) for each in model.parameters() if not each.is_floating_point() or each.dtype.itemsize < 2
    }
    if quantised:
        names = ", ".join(sorted(quantised))
        raise ModelError(f"{folder} has quantised weights ({names}); give the model in 16 bits, or a GGUF file")


def saved_dtype(folder: Path) -> torch.dtype:
    """Return the format that a folder's weights are meant to be loaded in."""
    dtype = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
