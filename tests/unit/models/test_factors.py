"""Texts with low-rank factors of their own, in one pass with others, on our kernels and in transformers."""

import copy
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.errors import SnapshotCorrupt
from omnidraft.models.hf.drafter import TorchDrafter
from omnidraft.models.kv_session import KvDrafter
from omnidraft.models.native.drafter import NativeDrafter
from omnidraft.snapshots.low_rank import B
from tests.unit.models.factor_cases import merged, random_factors
from tests.unit.models.native.families import family_model
from tests.unit.models.native.test_drafter import SHAPES, model
from tests.unit.models.session_driver import drive
from tests.unit.models.tiny import text, whole_pass

DRAFTERS: dict[str, Callable[..., KvDrafter]] = {
    "kernels": lambda shape: NativeDrafter(model(shape), "float32"),
    "int8 kernels": lambda shape: NativeDrafter(model(shape), "int8"),
    "transformers": lambda shape: TorchDrafter(copy.deepcopy(model(shape))),
}
NUM_TENANTS = 3


def assert_close(got: np.ndarray, reference: np.ndarray | torch.Tensor) -> None:
    """These wild factors make the rounding of the wild models ten times larger; a wrong row shows as 1."""
    torch.testing.assert_close(torch.from_numpy(got), torch.as_tensor(reference), atol=2e-3, rtol=2e-3)


@lru_cache(maxsize=32)
def drafter(kind: str, shape: str = "grouped queries") -> KvDrafter:
    return DRAFTERS[kind](shape)


@lru_cache(maxsize=32)
def opener(kind: str, tenant: int | None, shape: str = "grouped queries"):
    """What opens a text of a tenant; None has no factors."""
    if tenant is None:
        return drafter(kind, shape).open
    return drafter(kind, shape).with_factors(random_factors(model(shape), tenant, rank=3 + tenant))


@lru_cache(maxsize=8)
def reference(shape: str = "grouped queries") -> torch.nn.Module:
    """The model with tenant 1's factors in its weights."""
    return merged(model(shape), random_factors(model(shape), 1, rank=4))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["kernels", "transformers"])
@settings(max_examples=6)
@given(data=st.data())
def test_unmerged_factors_say_what_merged_ones_say(kind, shape, data):
    drive(
        opener(kind, 1, shape)(),
        data,
        lambda ids: whole_pass(reference(shape), ids)[-1],
        assert_close,
        vocab_size=model(shape).config.vocab_size,
    )


FACTORED = (
    "Phi-3", "GLM-4", "Falcon 40B", "Falcon 7B", "StarCoder2", "OLMo 2", "Gemma 3", "Gemma 4 31B", "Gemma 4 E2B",
    "Qwen2-MoE",
)  # fmt: skip


@pytest.mark.parametrize("name", FACTORED)
def test_factors_follow_modules_that_are_cut_and_reordered(name):
    """Fused, paired, grouped, ungated and shared matrices."""
    ids, factors = text(40), random_factors(family_model(name), 1, scale=0.05)
    drafter = NativeDrafter(family_model(name), "float32")
    got = drafter.with_factors(factors)().prefill_or_extend(0, ids)
    expected = whole_pass(merged(family_model(name), factors), ids)[-1]
    assert (expected - whole_pass(family_model(name), ids)[-1]).std() > 0.1
    assert_close(got, expected)


def test_unmerged_factors_of_rounded_weights_stay_as_close_as_those_weights():
    ids = text(40)
    expected = whole_pass(reference(), ids)[-1]
    got = torch.from_numpy(opener("int8 kernels", 1)().prefill_or_extend(0, ids))
    assert (got - expected).std() / expected.std() < 0.2


def logits_of(kind: str, texts: list[tuple[int | None, int]]) -> list[np.ndarray]:
    """The logits of texts (tenant, length), read and branched together."""
    sessions = [opener(kind, tenant)() for tenant, _ in texts]
    requests = [(session, 0, text(length, seed=length)) for session, (_, length) in zip(sessions, texts, strict=True)]
    read = drafter(kind).prefill_or_extend_all(requests)
    branched = drafter(kind).branch_all([(session, [3, 4], [-1, 0]) for session in sessions])
    return [np.concatenate([one[None], more]) for one, more in zip(read, branched, strict=True)]


tenants = st.one_of(st.none(), st.integers(0, NUM_TENANTS - 1))


@pytest.mark.parametrize("kind", ["kernels", "int8 kernels"])
@settings(max_examples=30)
@given(texts=st.lists(st.tuples(tenants, st.integers(1, 40)), min_size=1, max_size=6), threads=st.integers(1, 3))
def test_no_bit_of_a_text_depends_on_whose_texts_share_its_pass(kind, texts, threads):
    alone = [logits_of(kind, [each])[0] for each in texts]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = logits_of(kind, texts)
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


@settings(max_examples=10)
@given(texts=st.lists(st.tuples(tenants, st.integers(1, 20)), min_size=1, max_size=5))
def test_transformers_adds_factors_to_the_rows_of_their_text_only(texts):
    alone = [logits_of("transformers", [each])[0] for each in texts]
    for one, other in zip(alone, logits_of("transformers", texts), strict=True):
        assert_close(one, other)


def test_factors_of_zero_change_nothing():
    zero = {name: torch.zeros_like(tensor) for name, tensor in random_factors(model(), 0).items()}
    for kind in DRAFTERS:
        got = drafter(kind).with_factors(zero)().prefill_or_extend(0, text(9))
        assert np.array_equal(got, drafter(kind).open().prefill_or_extend(0, text(9)))


def test_a_layer_without_factors_stays_as_it_is():
    some = {name: tensor for name, tensor in random_factors(model(), 1).items() if "layers.1.self_attn.k_proj" in name}
    for kind in ("kernels", "transformers"):
        got = drafter(kind).with_factors(some)().prefill_or_extend(0, text(9))
        assert_close(got, whole_pass(merged(model(), some), text(9))[-1])


@pytest.mark.parametrize("kind", DRAFTERS)
def test_factors_of_another_model_are_refused(kind):
    good = random_factors(model(), 0)
    name = next(name for name in good if name.endswith(B))
    for bad in (
        {each: tensor for each, tensor in good.items() if each != name},
        good | {name: good[name][:-1]},
        {each.replace("model.layers.0", "model.layers.9"): tensor for each, tensor in good.items()},
    ):
        with pytest.raises(SnapshotCorrupt):
            drafter(kind).with_factors(bad)


def test_packed_factors_take_two_bytes_a_number():
    factors = random_factors(model(), 0, rank=8)
    packed = drafter("kernels").with_factors(factors).args[2]
    assert packed.num_bytes == sum(tensor.nbytes for tensor in factors.values())
