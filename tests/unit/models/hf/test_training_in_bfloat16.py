"""Passes in bfloat16 over float32 weights: the gradient is float32's up to rounding, and no small update is lost."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from omnidraft.models.hf import trainable_drafter, training_attention
from omnidraft.models.hf.trainable_drafter import TransformersTrainable, load_trainable
from omnidraft.models.hf.trained_weights import TrainedWeights
from omnidraft.models.probe.choice import TorchProducts
from omnidraft.models.probe.subprocess_trial import Outcome
from tests.unit.models.hf.test_trainable_drafter import packed

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
TEXTS = [torch.arange(length) * 7 % 97 for length in (13, 2, 20)]


@pytest.fixture(params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    if request.param == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True))
    else:
        kinds = ["sliding_attention", "full_attention"] * 2
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **HEADS, head_dim=16, sliding_window=5, layer_types=kinds))
    model.save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, precision: str, train: str = "full") -> TransformersTrainable:
    return load_trainable(folder, train=train, rank=4, seed=0, precision=precision)


def gradients(model: TransformersTrainable, starts: list[int]) -> dict[str, torch.Tensor]:
    hidden = model.hidden(packed(TEXTS, starts))
    logits = model.logits(hidden).float()
    (logits.logsumexp(dim=-1) - logits[:, 5]).mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.trained().items()}
    for parameter in model.trained().values():
        parameter.grad = None
    return found


@pytest.mark.parametrize(
    ("starts", "train", "most_scores"),
    [([9, 1, 4], "full", 1 << 20), ([0, 0, 0], "full", 0), ([9, 1, 4], "lora", 1 << 20)],
)
def test_gradients_are_those_of_float32_up_to_rounding(
    monkeypatch, folder: Path, starts: list[int], train: str, most_scores: int
) -> None:
    """Also of texts that are too long for our attention."""
    monkeypatch.setattr(training_attention, "MOST_SCORES", most_scores)
    exact, rounded = (gradients(load(folder, precision, train), starts) for precision in ("float32", "bfloat16"))
    assert exact.keys() == rounded.keys()
    for name, grad in rounded.items():
        assert grad.dtype == torch.float32
        assert (grad - exact[name]).norm() <= 0.05 * exact[name].norm(), name


def test_gradients_of_two_passes_are_added_up_in_float32(folder: Path) -> None:
    model = load(folder, "bfloat16")
    once = gradients(model, [0, 0, 0])
    for _ in range(2):
        logits = model.logits(model.hidden(packed(TEXTS, [0, 0, 0]))).float()
        (logits.logsumexp(dim=-1) - logits[:, 5]).mean().backward()
    for name, parameter in model.trained().items():
        torch.testing.assert_close(parameter.grad, 2 * once[name])


def test_updates_smaller_than_a_rounding_step_add_up(folder: Path) -> None:
    """Each is a thousandth of the weight; bfloat16 alone would forget all of them."""
    model = load(folder, "bfloat16")
    before = model.hidden(packed(TEXTS, [0, 0, 0])).detach()
    optimizer = torch.optim.SGD(model.trained().values(), lr=1.0)
    for _ in range(40):
        for parameter in model.trained().values():
            parameter.grad = -parameter.detach() * 1e-3
        optimizer.step()
    after = model.hidden(packed(TEXTS, [0, 0, 0])).detach()
    fresh = load(folder, "float32")
    for name, parameter in fresh.trained().items():
        torch.testing.assert_close(model.trained()[name], parameter * 1.001**40)
    assert not torch.equal(before, after)


def test_the_weights_stay_the_optimizers_when_the_precision_changes(folder: Path) -> None:
    model = load(folder, "float32")
    exact, owned = gradients(model, [9, 1, 4]), list(model.trained().values())
    model.compute_in("bfloat16")
    assert model.hidden(packed(TEXTS, [9, 1, 4])).dtype == torch.bfloat16
    model.compute_in("float32")
    assert all(left is right for left, right in zip(owned, model.trained().values(), strict=True))
    again = gradients(model, [9, 1, 4])
    assert all(torch.equal(exact[name], again[name]) for name in exact)


def products(**seconds: float) -> TorchProducts:
    return TorchProducts(None, Outcome(seconds), ())


def test_a_processor_that_multiplies_bfloat16_wrong_learns_in_float32(monkeypatch, caplog, folder: Path) -> None:
    monkeypatch.setattr(trainable_drafter.choice, "torch_products", lambda: products(float32=1.0))
    model = load(folder, "auto")
    assert model.precision == "float32"
    model.compute_in("bfloat16")
    assert model.precision == "float32"
    assert "bfloat16" in caplog.text


@pytest.mark.parametrize(("seconds", "chosen"), [(0.4, "bfloat16"), (0.9, "float32"), (4.0, "float32")])
def test_the_automatic_choice_is_bfloat16_where_it_is_clearly_faster(monkeypatch, seconds: float, chosen: str) -> None:
    trial = {"float32": 1.0, "bfloat16": seconds}
    monkeypatch.setattr(trainable_drafter.choice, "training_seconds", lambda: trial)
    assert trainable_drafter.automatic_precision() == chosen


def test_the_choice_comes_of_a_trial_of_whole_steps_in_every_format_that_is_multiplied_right() -> None:
    seconds = trainable_drafter.choice.training_seconds()
    assert seconds.keys() == trainable_drafter.choice.torch_products().outcome.seconds.keys()
    assert all(each > 0 for each in seconds.values())


def test_frozen_weights_come_back_from_bfloat16_as_they_were() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    weights = TrainedWeights(model, str)
    weights.compute_in("bfloat16")
    assert model[0].weight.dtype == torch.bfloat16
    weights.compute_in("float32")
    assert torch.equal(model[0].weight, before)
