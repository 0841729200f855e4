"""Texts that share a pass do not see each other, and what is context has no gradient."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from omnidraft import throttle
from omnidraft.errors import ConfigError
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.ports import PackedTexts

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}


@pytest.fixture(params=["llama", "gemma2", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    if request.param == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))
    elif request.param == "gemma2":  # which transformers computes with masks that are added
        model = Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, head_dim=16, sliding_window=5))
    else:
        kinds = ["sliding_attention", "full_attention"] * 2
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **HEADS, head_dim=16, sliding_window=5, layer_types=kinds))
    model.save_pretrained(tmp_path)
    return tmp_path


def hidden_of(folder: Path, text: torch.Tensor) -> torch.Tensor:
    """What transformers computes of a text alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.get_decoder()(input_ids=text[None], use_cache=False).last_hidden_state[0]


def packed(texts: list[torch.Tensor], starts: list[int]) -> PackedTexts:
    parts = [(n, range(start)) for n, start in enumerate(starts)]
    parts += [(n, range(start, len(texts[n]))) for n, start in enumerate(starts)]
    rows = [(n, at) for n, places in parts for at in places]
    return PackedTexts(
        torch.tensor([int(texts[n][at]) for n, at in rows]),
        torch.tensor([n for n, _ in rows]),
        torch.tensor([at for _, at in rows]),
        sum(starts),
    )


@pytest.mark.parametrize("starts", [[0, 0, 0], [9, 1, 4], [12, 0, 6]])
def test_hidden_states_are_those_of_each_text_alone(folder: Path, starts: list[int]) -> None:
    model = load_trainable(folder, train="full", rank=1, seed=0)
    texts = [torch.randint(0, 97, (length,)) for length in (13, 2, 20)]
    with torch.no_grad():
        together = model.hidden(packed(texts, starts))
        alone = [hidden_of(folder, text) for text in texts]
    expected = torch.cat([hidden[start:] for hidden, start in zip(alone, starts, strict=True)])
    torch.testing.assert_close(together, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_pass_rests_after_each_linear_layer_in_both_directions(folder: Path, train: str) -> None:
    model, rests = load_trainable(folder, train=train, rank=2, seed=0), list[int]()
    with throttle.gated(lambda: rests.append(1)):
        hidden = model.hidden(packed([torch.randint(0, 97, (15,))], [0]))
        num_forward = len(rests)
        hidden.square().sum().backward()
    assert num_forward >= len(model.linear_shapes())
    assert len(rests) - num_forward >= len(model.linear_shapes()) - 3  # the first layer's input may have no gradient


def test_without_context_the_gradient_is_that_of_a_plain_pass(folder: Path) -> None:
    text, model = torch.randint(0, 97, (15,)), load_trainable(folder, train="full", rank=1, seed=0)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.hidden(packed([text], [0])).square().sum().backward()
    theirs.get_decoder()(text[None]).last_hidden_state[0].square().sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    grads = {name: parameter.grad for name, parameter in model.trained().items() if parameter.grad is not None}
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-3, rtol=1e-3)


def test_the_padding_token_learns_where_a_text_has_it(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, pad_token_id=7)).save_pretrained(tmp_path)
    model = load_trainable(tmp_path, train="full", rank=1, seed=0)
    model.hidden(packed([torch.tensor([7, 8])], [0])).square().sum().backward()
    embedding = next(parameter for name, parameter in model.trained().items() if "embed_tokens" in name)
    assert embedding.grad[[7, 8]].any(dim=1).all()


def test_context_is_read_and_has_no_gradient(folder: Path) -> None:
    model = load_trainable(folder, train="full", rank=1, seed=0)
    embedding = next(parameter for name, parameter in model.trained().items() if "embed_tokens" in name)
    after = []
    for word in (5, 6):
        hidden = model.hidden(packed([torch.tensor([word, 7, 8, 9])], [2]))
        hidden.square().sum().backward()
        after.append(hidden.detach())
    assert (after[0] - after[1]).abs().max() > 1e-3
    assert not embedding.grad[[5, 6, 7]].any()
    assert embedding.grad[[8, 9]].any(dim=1).all()


@pytest.mark.parametrize(
    "model",
    [
        lambda: GraniteForCausalLM(GraniteConfig(**SIZES, **HEADS, logits_scaling=8.0)),
        lambda: CohereForCausalLM(CohereConfig(**SIZES, **HEADS, logit_scale=0.25)),
    ],
    ids=["granite", "cohere"],
)
def test_models_that_scale_their_logits_learn_them_scaled(tmp_path: Path, model: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(3)
    model().save_pretrained(tmp_path)
    trainable, text = load_trainable(tmp_path, train="full", rank=1, seed=0), torch.randint(4, 97, (9,))
    with torch.no_grad():
        own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(text[None]).logits[0]
        learned = trainable.logits(trainable.hidden(packed([text], [0])))
    torch.testing.assert_close(learned, own, atol=1e-4, rtol=1e-4)


def test_a_model_whose_logits_are_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(tmp_path)
    forward = LlamaForCausalLM.forward

    def shifted(self: LlamaForCausalLM, *args: Any, **options: Any) -> Any:
        output = forward(self, *args, **options)
        output.logits = output.logits * 3
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    with pytest.raises(ConfigError, match="LlamaForCausalLM does more between its head and its logits"):
        load_trainable(tmp_path, train="full", rank=1, seed=0)


def test_a_model_that_computes_with_its_keys_learns_texts_together(tmp_path: Path) -> None:
    torch.manual_seed(3)
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    heads = HEADS | {"num_key_value_heads": 2, "first_k_dense_replace": 4}
    DeepseekV2ForCausalLM(DeepseekV2Config(**SIZES, **heads, **ranks)).save_pretrained(tmp_path)
    model = load_trainable(tmp_path, train="full", rank=1, seed=0)
    texts = [torch.randint(0, 97, (length,)) for length in (7, 4)]
    with torch.no_grad():
        together = model.hidden(packed(texts, [2, 0]))
        alone = [hidden_of(tmp_path, text) for text in texts]
    torch.testing.assert_close(together, torch.cat([alone[0][2:], alone[1]]), atol=2e-5, rtol=1e-4)


def test_a_model_whose_weights_are_the_other_way_round_learns_no_factors(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"learner.train = 'full'"):
        load_trainable(tmp_path, train="lora", rank=2, seed=0)
    assert load_trainable(tmp_path, train="full", rank=2, seed=0).trained()
