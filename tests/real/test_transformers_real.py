"""A real model that transformers has loaded says the same with our drafter, in fewer passes."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from omnidraft.models.catalog.store import resolve
from omnidraft.transformers import Drafter

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "Write a Python function that adds two numbers."}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve("qwen2.5-coder-0.5b"))


@pytest.fixture(scope="module")
def model() -> Any:
    """In float32, where two tokens are hardly ever as close as rounding."""
    return AutoModelForCausalLM.from_pretrained(resolve("qwen2.5-coder-0.5b"), dtype=torch.float32).eval()


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
def test_generate_says_the_same_in_fewer_passes(model: Any, tokenizer: Any, is_sampled: bool) -> None:
    decode = {"policy": "fixed", "num_draft_tokens": 5}  # costs measured on a busy machine decide nothing here
    drafter = Drafter(model, tokenizer, "smollm2-135m", decode=decode)
    chat = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options = {**chat, "max_new_tokens": 32, "do_sample": is_sampled}
    torch.manual_seed(3)
    plain = model.generate(**options)
    torch.manual_seed(3)
    assert torch.equal(model.generate(**options, custom_generate=drafter), plain)
    assert drafter.stats.tokens_per_pass > 1.3
