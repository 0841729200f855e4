"""What an architecture of GGUF files is in transformers: a row each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from omnidraft.errors import ModelError
from omnidraft.models.catalog.gguf_file import GgufFile

Json = dict[str, Any]

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Factors of rotary frequencies, which are settings in transformers."""
OTHERWISE = "give the hub id or folder of the same model, or set models.engine = 'llamacpp'"
"""What to do with a file that is not converted."""
Change = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
"""What makes numbers of a file those of transformers, and what makes them back."""
_ONE_ADDED: Change = (lambda values: values - 1, lambda values: values + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Where an architecture differs from others."""

    model_type: str | Callable[[GgufFile], str]
    is_permuted: bool = False
    """Whether rows of queries and keys that are rotated together are neighbours in the file."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """What numbers become that the file has otherwise, by the end of their weight's name in transformers."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all models of the architecture have."""
    settings: Callable[[GgufFile], Json] = lambda file: {}
    """Settings that depend on the file."""
    sliding_theta: float | None = None
    """The rotary base of layers with a window, where the file does not say; None: as that of the others."""

    def read(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a weight in transformers, from those in the file."""
        return self._changed(name, values, 0)

    def written(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a weight in the file, from those in transformers."""
        return self._changed(name, values, 1)

    def _changed(self, name: str, values: torch.Tensor, direction: int) -> torch.Tensor:
        change = next((change for ending, change in self.changes.items() if name.endswith(ending)), None)
        return values if change is None else change[direction](values)


def _gemma_scale(num_layers: int) -> Callable[[GgufFile], Json]:
    """Return what Gemma divides scores by the root of: a head's size, but in the model of 27B with so many layers."""

    def settings(file: GgufFile) -> Json:
        is_27b = file.count("block_count") == num_layers
        return {"query_pre_attn_scalar": file.whole_head_size if is_27b else file.head_size}

    return settings


def _require_rotation(file: GgufFile) -> Json:
    """Raise ModelError for a Granite without rotation."""
    if not file.setting("rope.scaling.finetuned", True):
        raise ModelError(f"{file.name} has layers without positions, which is not converted")
    return {}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        model_type=lambda file: "mixtral" if file.setting("expert_count") else "llama", is_permuted=True
    ),
    "mistral3": Architecture(
        model_type=lambda file: "ministral3" if file.setting("attention.temperature_scale") else "mistral",
        is_permuted=True,
    ),
    "arcee": Architecture(model_type="arcee", is_permuted=True),
    "smollm3": Architecture(model_type="smollm3", is_permuted=True),
    "granite": Architecture(model_type="granite", is_permuted=True, settings=_require_rotation),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen2moe": Architecture(model_type="qwen2_moe"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen3moe": Architecture(model_type="qwen3_moe", fixed={"norm_topk_prob": True}),
    "gemma": Architecture(model_type="gemma", changes={"norm.weight": _ONE_ADDED}),
    "gemma2": Architecture(model_type="gemma2", changes={"norm.weight": _ONE_ADDED}, settings=_gemma_scale(46)),
    "gemma3": Architecture(
        model_type="gemma3_text", changes={"norm.weight": _ONE_ADDED}, settings=_gemma_scale(62), sliding_theta=1e4
    ),
    "phi3": Architecture(model_type="phi3"),
    "olmo2": Architecture(model_type=lambda file: "olmo3" if file.setting("attention.sliding_window") else "olmo2"),
    "olmoe": Architecture(model_type="olmoe"),
    "exaone4": Architecture(model_type="exaone4"),
    "command-r": Architecture(model_type="cohere"),
    "cohere2": Architecture(model_type="cohere2"),
    "glm4": Architecture(model_type="glm4"),
    "ernie4_5": Architecture(model_type="ernie4_5"),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense"),
    "seed_oss": Architecture(model_type="seed_oss"),
    "starcoder2": Architecture(model_type="starcoder2"),
    "stablelm": Architecture(model_type="stablelm"),
    "nemotron": Architecture(model_type="nemotron", changes={"norm.weight": _ONE_ADDED}),
    "gpt-oss": Architecture(model_type="gpt_oss"),
}


def architecture_of(file: GgufFile) -> Architecture:
    """Return the row of a file. Raises ModelError where there is none."""
    if (row := ARCHITECTURES.get(file.architecture)) is None:
        raise ModelError(
            f"{file.name} is of the architecture {file.architecture!r}, which is not converted; {OTHERWISE}"
        )
    return row
