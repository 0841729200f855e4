"""The baselines give transformers' own answers with any assistant, and their passes add up to the answers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from omnidraft.errors import RequestError
from omnidraft.models.hf.generate import Generated, HfAssisted, HfGenerate
from omnidraft.models.hf.tokenizer import load_tokenizer
from omnidraft.testing.tiny_models import make_drafter, make_target

Methods = dict[str, HfGenerate | HfAssisted]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose likeliest tokens stand out, beyond bfloat16's rounding, and are not among the drafter's.

    transformers 5.23 gives the drafter's probabilities for token-level intersection to the wrong tokens: in the order
    of `get_vocab()`, which differs from process to process. Where the wrong token was the target's only one, it would
    divide 0 by 0.
    """
    root = tmp_path_factory.mktemp("assisted")
    target, drafter = make_target(root / "target", spread=0.4), make_drafter(root / "drafter")
    make_shared_tokens_unlikely(target, drafter)
    return target, drafter


@torch.no_grad()
def make_shared_tokens_unlikely(target: Path, drafter: Path) -> None:
    """Give the tokens of both vocabularies a logit of 0, which is below the largest of the others."""
    vocab, drafters = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (target, drafter))
    model = AutoModelForCausalLM.from_pretrained(target)
    model.lm_head.weight[[vocab[token] for token in vocab.keys() & drafters.keys()]] = 0
    model.save_pretrained(target)


@pytest.fixture(scope="module")
def methods(folders: tuple[Path, Path]) -> Methods:
    target = HfGenerate(folders[0])
    return {
        "generate": target,
        "uad": HfAssisted(target, *folders, "uad"),
        "tli": HfAssisted(target, *folders, "tli"),
    }


def answer(
    method: HfGenerate | HfAssisted, folder: Path, temperature: float, num_tokens: int = 12, stop_id: int | None = None
) -> Generated:
    tokenizer = load_tokenizer(folder)
    prompt_ids = tokenizer.chat_prompt_ids([{"role": "user", "content": "How many clips in April?"}])
    stop_ids = sorted(tokenizer.stop_ids) if stop_id is None else [stop_id]
    return method.generate(prompt_ids, num_tokens, stop_ids=stop_ids, temperature=temperature)


@pytest.mark.parametrize("kind", ["uad", "tli"])
def test_assistance_leaves_a_greedy_answer_as_it_is(methods: Methods, folders: tuple[Path, Path], kind: str) -> None:
    plain = answer(methods["generate"], folders[0], 0.0)
    assert answer(methods[kind], folders[0], 0.0).ids == plain.ids
    assert plain.num_passes == len(plain.ids)


@pytest.mark.parametrize(("kind", "temperature"), [("generate", 0.0), ("generate", 1.0), ("uad", 0.0), ("tli", 1.0)])
def test_passes_and_times_add_up(methods: Methods, folders: tuple[Path, Path], kind: str, temperature: float) -> None:
    made = answer(methods[kind], folders[0], temperature)
    assert 1 <= made.num_passes <= len(made.ids)
    assert len(made.ids) - 21 <= made.num_later_tokens < len(made.ids)
    assert made.first_token_s > 0
    assert made.decode_s > 0
    assert answer(methods[kind], folders[0], temperature).ids == made.ids


def test_one_token_takes_one_pass_and_no_decoding(methods: Methods, folders: tuple[Path, Path]) -> None:
    made = answer(methods["generate"], folders[0], 0.0, num_tokens=1)
    assert (len(made.ids), made.num_passes, made.num_later_tokens, made.decode_s) == (1, 1, 0, 0.0)


@pytest.mark.parametrize("kind", ["generate", "uad", "tli"])
def test_an_answer_ends_with_its_stop_token(methods: Methods, folders: tuple[Path, Path], kind: str) -> None:
    whole = answer(methods["generate"], folders[0], 0.0).ids
    assert whole[4] not in whole[:4]
    assert answer(methods[kind], folders[0], 0.0, stop_id=whole[4]).ids == whole[:5]


def test_uad_refuses_to_sample(methods: Methods, folders: tuple[Path, Path]) -> None:
    with pytest.raises(RequestError, match="greedy decoding only"):
        answer(methods["uad"], folders[0], 1.0)
