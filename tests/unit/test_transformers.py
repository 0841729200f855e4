"""A drafter changes how fast `model.generate` is, and nothing of what it returns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    TextIteratorStreamer,
)

from omnidraft.errors import ConfigError, ModelError, RequestError
from omnidraft.testing.tiny_models import SIZES
from omnidraft.transformers import Drafter
from tests.models.families import make_model

VOCAB = 448
RANDOM: dict[str, Any] = {"vocab_size": VOCAB, **SIZES, "initializer_range": 0.2}
DECODE = {"policy": "fixed", "num_draft_tokens": 5}
PROMPTS = ["How many clips did Natalia sell", "A robe takes 2 bolts", "Numbers: 0 1 2 3 0 1 2 3 0 1"]


def random_model(family: str) -> PreTrainedModel:
    torch.manual_seed(7)
    match family:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**RANDOM)).eval()
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**RANDOM)).eval()
    return make_model(family, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def home(omnidraft_home: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
        yield


@pytest.fixture(scope="module")
def tokenizer(tiny_models: tuple[Path, Path]) -> Any:
    return AutoTokenizer.from_pretrained(tiny_models[0], padding_side="left")


def drafter_of(model: PreTrainedModel, tokenizer: Any, tiny_models: tuple[Path, Path], **sections: Any) -> Drafter:
    sections = {"decode": DECODE, "models": {"drafter_precision": "float32"}} | sections
    return Drafter(model, tokenizer, str(tiny_models[1]), **sections)


@pytest.fixture(scope="module", params=["llama", "Gemma 3 4B"])
def drafter(request: pytest.FixtureRequest, tokenizer: Any, tiny_models: tuple[Path, Path], home: None) -> Drafter:
    return drafter_of(random_model(request.param), tokenizer, tiny_models)


@pytest.fixture(scope="module")
def reproducible(tokenizer: Any, tiny_models: tuple[Path, Path], home: None) -> Drafter:
    decode = {**DECODE, "mode": "reproducible"}
    return drafter_of(random_model("qwen2"), tokenizer, tiny_models, decode=decode)


@pytest.fixture(scope="module")
def qwen2(tokenizer: Any, tiny_models: tuple[Path, Path], home: None) -> Drafter:
    return drafter_of(random_model("qwen2"), tokenizer, tiny_models)


def generated(drafter: Drafter, inputs: Any, *, seed: int = 0, is_drafted: bool = True, **options: Any) -> Any:
    """What `generate` returns with this seed."""
    torch.manual_seed(seed)
    if is_drafted:
        options["custom_generate"] = drafter
    return drafter._model.generate(**inputs, **{"pad_token_id": 0, "max_new_tokens": 24, **options})


SAMPLED = st.fixed_dictionaries(
    {"do_sample": st.just(True)},
    optional={
        "temperature": st.sampled_from([0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 3, 50]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.just(0.05),
    },
)
OPTIONS = st.builds(
    lambda kind, more: kind | more | ({} if kind["do_sample"] else {"num_return_sequences": 1}),
    st.one_of(st.just({"do_sample": False}), SAMPLED),
    st.fixed_dictionaries(
        {"eos_token_id": st.one_of(st.just(2), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60))},
        optional={
            "repetition_penalty": st.sampled_from([0.8, 1.3]),
            "no_repeat_ngram_size": st.just(2),
            "min_new_tokens": st.just(5),
            "suppress_tokens": st.just([65, 66]),
            "num_return_sequences": st.just(2),
        },
    ),
)


@settings(max_examples=6, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=OPTIONS, num_prompts=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_whatever_generate_is_asked_it_returns_what_it_returns_without_drafts(
    drafter: Drafter, tokenizer: Any, options: dict[str, Any], num_prompts: int, seed: int
) -> None:
    """Greedy and sampled with the same seed of torch, alone and in padded batches.

    Passes over several tokens round differently, which changes a token in one of some hundred runs with other examples.
    """
    inputs = tokenizer(PROMPTS[:num_prompts], return_tensors="pt", padding=True)
    plain = generated(drafter, inputs, seed=seed, is_drafted=False, **options)
    next_random = torch.rand(1)
    assert torch.equal(generated(drafter, inputs, seed=seed, **options), plain)
    assert torch.equal(torch.rand(1), next_random)


def test_what_was_generated_before_drafts_what_comes_next(drafter: Drafter, tokenizer: Any) -> None:
    drafter.forget()
    inputs = tokenizer(PROMPTS[:1], return_tensors="pt")
    first = generated(drafter, inputs)
    passes = drafter.stats.num_passes
    assert torch.equal(generated(drafter, inputs), first)
    assert drafter.stats.num_passes < passes
    assert drafter.stats.num_tokens == first.shape[1] - inputs["input_ids"].shape[1]
    assert drafter._loaded.host.drafter_memory.num_ids > 0
    drafter.forget()
    assert drafter._loaded.host.drafter_memory.num_ids == 0


def test_a_policy_that_chooses_gives_the_same_text(tokenizer: Any, tiny_models: tuple[Path, Path], home: None) -> None:
    drafter = drafter_of(random_model("llama"), tokenizer, tiny_models, decode={"policy": "cost"})
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    plain = generated(drafter, inputs, is_drafted=False)
    for _ in range(2):
        assert torch.equal(generated(drafter, inputs), plain)


def test_without_a_drafter_earlier_texts_draft(tokenizer: Any, home: None) -> None:
    drafter = Drafter(random_model("llama"), tokenizer, "none", decode=DECODE)
    inputs = tokenizer(PROMPTS[2:], return_tensors="pt")
    plain = generated(drafter, inputs, is_drafted=False)
    for _ in range(2):
        assert torch.equal(generated(drafter, inputs), plain)
    assert drafter.stats.tokens_per_pass > 1


@settings(max_examples=6)
@given(options=OPTIONS, num_prompts=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_reproducible_mode_gives_the_bits_of_decoding_without_drafts(
    reproducible: Drafter, tokenizer: Any, options: dict[str, Any], num_prompts: int, seed: int
) -> None:
    inputs = tokenizer(PROMPTS[:num_prompts], return_tensors="pt", padding=True)
    options = {**options, "return_dict_in_generate": True, "output_logits": True}
    drafted, plain = (
        generated(reproducible, inputs, seed=seed, num_draft_tokens=number, **options) for number in (5, 0)
    )
    assert torch.equal(drafted.sequences, plain.sequences)
    assert all(torch.equal(one, other) for one, other in zip(drafted.logits, plain.logits, strict=True))


def test_scores_and_logits_are_those_of_each_token(qwen2: Drafter, tokenizer: Any) -> None:
    inputs = tokenizer(PROMPTS[:1], return_tensors="pt")
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "top_k": 5}
    plain = generated(qwen2, inputs, is_drafted=False, do_sample=True, **options)
    drafted = generated(qwen2, inputs, do_sample=True, **options)
    assert torch.equal(drafted.sequences, plain.sequences)
    torch.testing.assert_close(drafted.scores, plain.scores, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(drafted.logits, plain.logits, atol=1e-4, rtol=1e-4)


def test_callers_own_processors_and_criteria_are_asked_once_a_token_in_order(qwen2: Drafter, tokenizer: Any) -> None:
    """They may have a memory of their own, so what was only drafted must not reach them."""

    def watched(is_drafted: bool) -> tuple[Any, list[list[int]]]:
        seen: list[list[int]] = []

        def forbid_last(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(input_ids[0].tolist())
            scores[0, seen[-1][-1]] = -torch.inf
            return scores

        def is_long(input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
            seen.append(input_ids[0].tolist())
            return torch.tensor([input_ids.shape[1] > 20])

        own = {"logits_processor": [forbid_last], "stopping_criteria": [is_long]}
        return generated(qwen2, inputs, is_drafted=is_drafted, **own), seen

    inputs = tokenizer(PROMPTS[:1], return_tensors="pt")
    (plain, seen_plainly), (drafted, seen) = watched(is_drafted=False), watched(is_drafted=True)
    assert torch.equal(drafted, plain)
    assert seen == seen_plainly
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    with pytest.raises(RequestError, match="one prompt at a time"):
        generated(qwen2, batch, logits_processor=[lambda input_ids, scores: scores])


def test_a_streamer_gets_every_token_and_the_end(qwen2: Drafter, tokenizer: Any) -> None:
    inputs = tokenizer(PROMPTS[:1], return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    ids = qwen2.generate(**inputs, streamer=streamer, max_new_tokens=24, pad_token_id=0)
    assert torch.equal(ids, generated(qwen2, inputs, is_drafted=False))
    assert "".join(streamer) == tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])


def test_a_text_ends_at_a_stop_string(qwen2: Drafter, tokenizer: Any) -> None:
    inputs = tokenizer(PROMPTS[:1], return_tensors="pt")
    pieces = [tokenizer.decode([token]) for token in generated(qwen2, inputs)[0, inputs["input_ids"].shape[1] :]]
    stop = next(piece for piece in pieces[2:-2] if len(piece) > 1 and piece.isascii())
    options = {"max_new_tokens": 24, "pad_token_id": 0, "stop_strings": stop}
    plain = qwen2._model.generate(**inputs, **options, tokenizer=tokenizer)
    assert torch.equal(qwen2.generate(**inputs, **options), plain)
    assert plain.shape[1] < inputs["input_ids"].shape[1] + 24


def test_rows_are_kept_to_a_schema_with_and_without_drafts(qwen2: Drafter, tokenizer: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    inputs = tokenizer(PROMPTS[:2], return_tensors="pt", padding=True)
    options = {"json_schema": schema, "eos_token_id": 2, "max_new_tokens": 60, "do_sample": True}
    drafted, plain = (generated(qwen2, inputs, num_draft_tokens=number, **options) for number in (None, 0))
    assert torch.equal(drafted, plain)
    for row in drafted[:, inputs["input_ids"].shape[1] :]:
        text = tokenizer.decode(row, skip_special_tokens=True)
        assert "".join(text.split()) == '{"n":7}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be at least 0"),
        ({"json_schema": {}, "regex": "a"}, "either json_schema or regex"),
        ({"max_new_tokens": 5000}, "context"),
        ({"regex": "yes|no", "min_new_tokens": 8, "eos_token_id": 2}, "no token that can follow"),
        ({"regex": "a", "min_new_tokens": 8, "eos_token_id": 2, "renormalize_logits": True}, "no token that can"),
    ],
)
def test_what_cannot_be_drafted_for_is_refused_by_name(
    options: dict[str, Any], message: str, qwen2: Drafter, tokenizer: Any
) -> None:
    with pytest.raises(RequestError, match=message):
        generated(qwen2, tokenizer(PROMPTS[:1], return_tensors="pt"), **options)


def test_padding_behind_a_prompt_and_keys_of_the_caller_are_refused(qwen2: Drafter, tokenizer: Any) -> None:
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="right")
    with pytest.raises(RequestError, match="padded on the left"):
        generated(qwen2, inputs)
    one = tokenizer(PROMPTS[:1], return_tensors="pt")
    with pytest.raises(RequestError, match="position_ids"):
        generated(qwen2, one, position_ids=torch.arange(one["input_ids"].shape[1])[None] + 1)
    past = qwen2._model.generate(**one, max_new_tokens=2, return_dict_in_generate=True, pad_token_id=0).past_key_values
    with pytest.raises(RequestError, match="past_key_values"):
        generated(qwen2, one, past_key_values=past)


def test_the_model_is_given_back_as_it_was(tokenizer: Any, tiny_models: tuple[Path, Path], home: None) -> None:
    model = random_model("llama").train()
    drafter = drafter_of(model, tokenizer, tiny_models)
    inputs = tokenizer(PROMPTS[:1], return_tensors="pt")
    with pytest.raises(RequestError):
        generated(drafter, inputs, max_new_tokens=5000)
    generated(drafter, inputs)
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())
    with pytest.raises(RequestError, match="another model"):
        random_model("llama").generate(**inputs, custom_generate=drafter, pad_token_id=0)


def test_long_texts_that_are_rotated_otherwise_are_those_of_generate_and_none_grows_long(
    tokenizer: Any, tiny_models: tuple[Path, Path], home: None
) -> None:
    drafter = drafter_of(random_model("Phi-4-mini"), tokenizer, tiny_models)
    inputs = [tokenizer(PROMPTS[0] * num, return_tensors="pt") for num in (1, 12)]
    assert inputs[0].input_ids.shape[1] + 24 <= 64 < inputs[1].input_ids.shape[1]
    for each in inputs:
        plain = generated(drafter, each, is_drafted=False)
        assert torch.equal(generated(drafter, each), plain)
        assert torch.equal(generated(drafter, each, is_drafted=False), plain)
    with pytest.raises(RequestError, match="more than 64 tokens otherwise"):
        generated(drafter, inputs[0], max_new_tokens=60)


def test_a_model_or_setting_that_cannot_be_used_is_refused(
    tokenizer: Any, tiny_models: tuple[Path, Path], home: None
) -> None:
    eager = AutoModelForCausalLM.from_pretrained(tiny_models[0], attn_implementation="eager")
    with pytest.raises(ModelError, match="attn_implementation='sdpa'"):
        Drafter(eager, tokenizer, str(tiny_models[1]))
    with pytest.raises(ConfigError, match=r"decode\.mode"):
        Drafter(random_model("llama"), tokenizer, str(tiny_models[1]), decode={"mode": "boldest"})
