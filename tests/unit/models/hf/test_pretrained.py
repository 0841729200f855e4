"""Loading a model changes torch's default floating type meanwhile: nothing that runs beside it may depend on that.
Folders whose weights are not the whole model are refused."""

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

from omnidraft.errors import ModelError
from omnidraft.models.hf.pretrained import causal_lm
from omnidraft.models.hf.target import load_model
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.models.probe import torch_products
from tests.tiny_pair import Pair, assert_same, records_of
from tests.unit.models.drafted_trees import BUSHY, drafted
from tests.unit.models.tiny import CONFIGS, text, tiny_model, tiny_target

LOADERS = {"served": load_model, "learned": partial(load_trainable, train="full", rank=1, seed=0)}


@pytest.fixture
def while_loading(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Runs a function as if another thread loaded a model in bfloat16 from its beginning to its end."""

    def run(function: Callable[[], Any]) -> Any:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return function()
        finally:
            torch.set_default_dtype(torch.float32)

    return run


@pytest.mark.parametrize(
    ("train", "precision", "loss"),
    [("full", "float32", "dm + 0.2 ngram"), ("lora", "bfloat16", "dm + 0.2 ngram"), ("full", "bfloat16", "alm")],
)
def test_learning_is_the_same_while_a_model_is_loaded(pair: Pair, while_loading, train, precision, loss) -> None:
    learners = [pair.learner(train=train, precision=precision, loss=loss, replay_records=1) for _ in range(2)]
    records = records_of(pair, 4)

    def learn(number: int) -> float | None:
        for _ in range(2):
            learners[number].step(records)
        return learners[number].agreement(records)

    assert learn(0) == while_loading(lambda: learn(1))
    assert_same(learners[0].state(), learners[1].state())


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_the_same_while_a_model_is_loaded(while_loading, name: str) -> None:
    prompt, target = text(13), tiny_target(name)
    tree = drafted([prompt[-1], *text(10, seed=2)], BUSHY)

    def score() -> torch.Tensor:
        return target.open(prompt, 12, "fast").score(tree)

    assert torch.equal(score(), while_loading(score))


def test_the_probe_computes_the_same_while_a_model_is_loaded(while_loading) -> None:
    for dtype in torch_products.FORMATS.values():
        assert torch_products._problem(dtype) == while_loading(lambda dtype=dtype: torch_products._problem(dtype))


def test_two_loads_at_once_leave_the_default_type_as_it_was(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    real = transformers.AutoModelForCausalLM.from_pretrained
    durations_s = iter((0.3, 0.6))

    def slowly(*args: Any, **options: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(options["dtype"])
        time.sleep(next(durations_s))
        torch.set_default_dtype(before)
        return real(*args, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", slowly)
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(causal_lm, pair.folder, dtype=torch.bfloat16) for _ in range(2)]
        assert all(load.result().dtype == torch.bfloat16 for load in loads)
    try:
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("head", [{}, {"lm_head.weight": torch.zeros(7, 64)}], ids=["missing", "of another shape"])
def test_a_folder_without_weights_that_fit_is_refused(
    tmp_path: Path, loader: str, head: dict[str, torch.Tensor]
) -> None:
    """transformers makes them at random, or says no name in its error."""
    CONFIGS["llama"].save_pretrained(tmp_path)
    others = {name: tensor for name, tensor in tiny_model("llama").state_dict().items() if name != "lm_head.weight"}
    save_file(others | head, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has no weights that fit lm_head\.weight: "):
        LOADERS[loader](tmp_path)


def save_multimodal_without(parts: tuple[str, ...], folder: Path) -> Gemma3ForConditionalGeneration:
    """Save a tiny model that reads images too, without the weights whose names contain one of these parts."""
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    text_config = copy.deepcopy(CONFIGS["gemma3"])
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text_config, vision_config=vision, mm_tokens_per_image=4)
    )
    model.save_pretrained(folder / "whole")
    model.config.save_pretrained(folder)
    weights = load_file(folder / "whole" / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not any(part in name for part in parts)}
    assert 0 < len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def test_a_multimodal_model_that_was_saved_without_its_vision_part_is_loaded(tmp_path: Path) -> None:
    saved = save_multimodal_without(("vision", "multi_modal"), tmp_path)
    loaded = causal_lm(tmp_path, dtype=torch.float32)
    assert isinstance(loaded, Gemma3ForConditionalGeneration)
    assert_same(loaded.get_decoder().state_dict(), saved.get_decoder().state_dict())
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight)


def test_a_multimodal_model_without_weights_that_compute_text_is_refused(tmp_path: Path) -> None:
    save_multimodal_without(("up_proj",), tmp_path)
    with pytest.raises(ModelError, match=r"has no weights that fit model\.language_model\.layers\.0\.mlp\.up_proj"):
        causal_lm(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("loader", LOADERS)
def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path, loader: str) -> None:
    """transformers would add its layers, which our kernels leave out."""
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merge it"):
        LOADERS[loader](tmp_path)
