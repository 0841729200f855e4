"""A drafter of a loaded model looks at each call anew: at its attention, its weights and the time of its rows."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.generation import stopping_criteria

from omnidraft.errors import ModelError, RequestError
from omnidraft.testing.tiny_models import SIZES
from omnidraft.transformers import Drafter

PROMPT = torch.arange(1, 41)[None]
OPTIONS = {"max_new_tokens": 24, "pad_token_id": 0}
SMALL = 2e-4
"""GiB that hold the keys of one text, not those of two."""


@pytest.fixture
def model() -> Any:
    torch.manual_seed(7)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=448, **SIZES, initializer_range=0.2)).eval()


@pytest.fixture
def drafter_of(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Drafter]:
    """Return what makes a drafter that drafts from earlier texts."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    tokenizer = AutoTokenizer.from_pretrained(tiny_models[0])
    decode = {"policy": "fixed", "num_draft_tokens": 5}
    return lambda model, **sections: Drafter(model, tokenizer, "none", decode=decode, **sections)


def test_attention_that_takes_no_trees_is_refused_also_when_it_was_set_after_the_drafter_was_made(
    model: Any, drafter_of: Callable[..., Drafter]
) -> None:
    drafter, plain = drafter_of(model), model.generate(PROMPT, **OPTIONS)
    model.set_attn_implementation("eager")
    with pytest.raises(ModelError, match="attn_implementation='sdpa'"):
        model.generate(PROMPT, custom_generate=drafter, **OPTIONS)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(PROMPT, custom_generate=drafter, **OPTIONS), plain)


def test_weights_may_change_between_two_calls(model: Any, drafter_of: Callable[..., Drafter]) -> None:
    """No keys of an earlier call are used again."""
    drafter = drafter_of(model)
    model.generate(PROMPT, custom_generate=drafter, **OPTIONS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    plain = model.generate(PROMPT, **OPTIONS)
    assert torch.equal(model.generate(PROMPT, custom_generate=drafter, **OPTIONS), plain)


def test_all_rows_have_the_same_time_also_more_than_are_decoded_together_otherwise(
    model: Any, drafter_of: Callable[..., Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass takes a second here, the first of which reads the prompt."""
    clock = SimpleNamespace(now_s=0.0)

    def begin_pass(*_: Any) -> None:
        clock.now_s += 1.0

    drafter = drafter_of(model)
    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda: clock.now_s))
    model.register_forward_pre_hook(begin_pass)
    num_rows = 2 + drafter._loaded.host.settings.scheduler.max_num_seqs
    prompts = PROMPT.repeat(num_rows, 1)
    ids = model.generate(prompts, custom_generate=drafter, num_draft_tokens=0, max_time=5.5, **OPTIONS)
    assert ids.shape[1] == PROMPT.shape[1] + 5
    assert drafter.stats.num_tokens == num_rows * 5


def test_a_time_limit_is_refused_where_rows_might_wait_for_memory_until_it_is_over(
    model: Any, drafter_of: Callable[..., Drafter]
) -> None:
    drafter = drafter_of(model, scheduler={"kv_cache_gib": SMALL})
    prompts = PROMPT.repeat(2, 1)
    with pytest.raises(RequestError, match=r"max_time.*scheduler\.kv_cache_gib"):
        model.generate(prompts, custom_generate=drafter, max_time=60.0, **OPTIONS)
    plain = model.generate(prompts, **OPTIONS)
    assert torch.equal(model.generate(prompts, custom_generate=drafter, **OPTIONS), plain)
    assert torch.equal(model.generate(PROMPT, custom_generate=drafter, max_time=60.0, **OPTIONS), plain[:1])
