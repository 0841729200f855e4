"""Families that our kernels do not know run through transformers, exactly: trees, several texts, both modes."""

from functools import lru_cache

import pytest
import torch
from transformers import PreTrainedModel

from omnidraft.errors import ModeRefused
from omnidraft.models.hf.target import TransformersTarget
from omnidraft.models.native.target import NativeTarget
from omnidraft.models.native.weights import unsupported_reason
from omnidraft.ports import DraftTree
from tests.models.families import make_model
from tests.unit.models.tiny import PASSES, text

NAMES = (
    "Gemma 3n", "DeepSeek V3", "GPT-J", "GPT-2", "Cohere", "DiffLlama",
)  # fmt: skip
WITH_OWN_EXPERTS = ("DBRX", "LongCat", "JetMoE")
"""Families whose experts transformers has no choice of implementations for."""
family_model = lru_cache(maxsize=2)(make_model)


def whole_pass(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0, -1].float()


@lru_cache(maxsize=2)
def target(name: str) -> TransformersTarget:
    model = family_model(name)
    assert unsupported_reason(model)
    return TransformersTarget(model, PASSES, name=name, precision="float32")


def tree(ids: list[int]) -> DraftTree:
    return DraftTree((ids[-1], 11, 12, 13, 14), (0, 0, 1, 0, 3), (None, *["drafter"] * 4), (0.0,) * 5)


PATHS = ([], [11], [11, 12], [13], [13, 14])


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_past_the_window_is_scored_as_its_texts(name):
    model, ids = family_model(name), text(45)
    scores = target(name).open(ids, 10, "fast").score(tree(ids))
    expected = torch.stack([whole_pass(model, [*ids, *path]) for path in PATHS])
    torch.testing.assert_close(scores, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_two_texts_share_a_pass(name):
    model, ids, other = family_model(name), text(45), text(20, seed=3)
    sessions = [target(name).open(each, 10, "fast") for each in (ids, other)]
    for session in sessions:
        session.score(DraftTree.empty(5))
    scores, one = target(name).forward([(sessions[0], tree(ids)), (sessions[1], DraftTree.empty(other[-1]))])
    torch.testing.assert_close(scores[4], whole_pass(model, [*ids, 13, 14]), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(one[0], whole_pass(model, other), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", [*NAMES, *WITH_OWN_EXPERTS])
def test_reproducible_mode_holds(name):
    """Some processors have MKL multiply Gemma 3n's narrow layers otherwise for other numbers of rows, unless it has
    MKL_CBWR=COMPATIBLE: there the mode is refused, as it has to be."""
    try:
        target(name).open(text(9), 5, "reproducible")
    except ModeRefused:
        if name != "Gemma 3n":
            raise
        pytest.skip("MKL's bits depend on the number of rows on this processor")


@pytest.mark.parametrize("name", ["Mistral Small 3.1", "Qwen2.5-VL", "Qwen3-VL"])
@pytest.mark.parametrize("target_type", [TransformersTarget, NativeTarget])
def test_a_text_model_inside_one_of_images_is_the_target(name, target_type):
    model = make_model(name)
    assert unsupported_reason(model) is None
    ids = text(30)
    scores = target_type(model, name="x", precision="float32").open(ids, 10, "fast").score(tree(ids))
    torch.testing.assert_close(scores[2], whole_pass(model, [*ids, 11, 12]), atol=2e-3, rtol=2e-3)
