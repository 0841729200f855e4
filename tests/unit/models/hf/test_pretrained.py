"""Loading a model changes torch's default floating type meanwhile: nothing that runs beside it may depend on that."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers

from omnidraft.models.hf.pretrained import causal_lm
from omnidraft.models.probe import torch_products
from tests.tiny_pair import Pair, assert_same, records_of
from tests.unit.models.drafted_trees import BUSHY, drafted
from tests.unit.models.tiny import CONFIGS, text, tiny_target


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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("loss", ["dm + 0.2 ngram", "alm"])
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
