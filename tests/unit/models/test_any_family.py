"""A few families from end to end, each for a reason; `make test-models` does the same for all, with real tokenizers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from omnidraft.errors import ConfigError
from tests.models.learning import ALL, drafter_pair, learn_family, require_learning
from tests.models.runs import Server, TokenizerFiles, decode_family, new_row
from tests.tiny_pair import TEXTS, save_tokenizer

DECODED = {
    "Llama 3": ("our kernels", 32),  # drafted for by a Qwen3
    "DeepSeek V3": ("transformers", 32),  # computes with keys before it reads them
    "Qwen3.5": ("transformers", 32),  # recurrent layers
    "Phi-4-mini": ("our kernels", 80),  # past its first context, behind which it rotates otherwise
}
"""What computes a family, and the tokens of its longest texts."""
LEARNING = ("gpt-oss", "DeepSeek V2", "Gemma 3 4B")


def files(folder: Path, vocab_size: int, texts: tuple[str, ...]) -> TokenizerFiles:
    vocabulary = save_tokenizer(folder, vocab_size, texts).vocabulary
    return TokenizerFiles(folder, len(vocabulary), vocabulary.roles["eos"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    return files(tmp_path_factory.mktemp("tokenizer"), 340, TEXTS[:2])


@pytest.fixture(scope="module")
def other(
    tokenizer: TokenizerFiles, omnidraft_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    target = tokenizer.save_family("Llama 3", root / "target")
    drafter = files(root / "tokenizer", 360, TEXTS[2:]).save_family("Qwen3", root / "drafter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        yield Server(target, drafter)


@pytest.mark.parametrize("name", DECODED)
def test_every_text_is_that_of_transformers(
    name: str, tokenizer: TokenizerFiles, other: Server, tmp_path: Path
) -> None:
    row, (path, length) = new_row(name), DECODED[name]
    decode_family(row, tokenizer.save_family(name, tmp_path / "model"), [other], length)
    assert row.computed_by == path
    assert row.modes == ["fast", "reproducible"]


@pytest.mark.parametrize("name", LEARNING)
def test_a_drafter_learns_and_drafts_with_what_it_learned(name: str, tmp_path: Path) -> None:
    row = new_row(name)
    learn_family(row, tmp_path)
    assert row.learns == list(ALL)


def test_a_drafter_without_linear_layers_has_no_factors(tmp_path: Path) -> None:
    pair = drafter_pair("GPT-2", tmp_path)
    with pytest.raises(ConfigError, match=r"learner.factor_tenants = 0"):
        require_learning(pair, tmp_path, "tenants")
