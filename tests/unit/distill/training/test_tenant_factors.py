"""Factors learn from their tenant's records only, and leave everything else as it is."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.distill.training.tenant_factors import FactorPlan, serving_factors
from omnidraft.snapshots.low_rank import A, B
from omnidraft.snapshots.tenant_factors import FittedFactors, from_tensor, to_tensor
from tests.tiny_pair import TEXTS, assert_same

FACTORS = {"factor_tenants": 4, "factor_plan": FactorPlan(4, 6, 1e-2)}


def records(pair, tenant: str, num: int, first: int = 0) -> list:
    return [
        pair.record(f"{tenant}{n}", TEXTS[n % 3], seed=n, tenant=tenant, time_ms=1000 + n)
        for n in range(first, first + num)
    ]


@pytest.mark.parametrize("learning", [{"train": "lora"}, {"precision": "bfloat16", "head": True}], ids=str)
def test_a_tenants_factors_learn_and_no_weight_of_the_drafter_changes(lively_pair, learning):
    pair = lively_pair
    learner = pair.learner(learning_rate=1e-6, **FACTORS, **learning)
    for first in (0, 2):
        learner.step(records(pair, "a", 2, first))
    before = {name: tensor.clone() for name, tensor in learner.state().items()}
    mine = records(pair, "a", 4)
    without = np.concatenate(learner.hits(mine)).mean()
    for _ in range(6):
        fitted = learner.factors.fit("a", learner.counters.num_steps)
    with learner.model.factored(serving_factors(fitted).tensors):
        assert np.concatenate(learner.hits(mine)).mean() > without
    after = learner.state()
    assert_same({name: after[name] for name in before}, before)
    assert np.concatenate(learner.hits(mine)).mean() == without
    assert all(parameter.requires_grad and parameter.grad is None for parameter in learner.model.trained().values())
    learner.step(records(pair, "a", 4, 10))
    assert any(not torch.equal(before[name], each) for name, each in learner.state().items() if name in before)


def test_nothing_of_another_tenant_reaches_a_tenants_factors(pair):
    others, step = ["b", "c", "b"], 3
    fitted = []
    for more in ([], others):
        learner = pair.learner(**FACTORS)
        weights = learner.serving_tensors()
        mine = records(pair, "a", 5)
        learner.factors._replay.add([*mine, *(each for name in more for each in records(pair, name, 2))], 0)
        with learner.serving(weights):
            for name in dict.fromkeys(more):
                learner.factors.fit(name, step)
            fitted.append(learner.factors.fit("a", step))
    assert_same(fitted[0].tensors, fitted[1].tensors)


def test_fitting_goes_on_from_the_state_as_if_nothing_had_happened(pair):
    whole, resumed = pair.learner(**FACTORS), pair.learner(**FACTORS)
    whole.step(records(pair, "a", 4))
    whole.factors.fit("a", 1)
    resumed.load_state({name: tensor.clone() for name, tensor in whole.state().items()})
    one, other = (learner.factors.fit("a", 2) for learner in (whole, resumed))
    assert (one.version, one.since_ms) == (other.version, other.since_ms) == (2, 1000)
    assert_same(one.tensors, other.tensors)


def test_factors_of_another_rank_begin_anew(pair):
    learner = pair.learner(**FACTORS)
    learner.step(records(pair, "a", 4))
    learner.factors.fit("a", 1)
    other = pair.learner(factor_tenants=4, factor_plan=FactorPlan(2, 6, 1e-2))
    other.load_state(learner.state())
    assert not other.factors.tenants
    assert other.factors.fit("a", 1).version == 1


@given(st.text(min_size=1), st.integers(0, 2**60), st.integers(1, 2**40))
def test_the_bytes_of_factors_are_read_as_they_were(tenant, since_ms, version):
    tensors = {"layer" + A: torch.randn(2, 3).bfloat16(), "layer" + B: torch.randn(4, 2)}
    read = from_tensor(to_tensor(FittedFactors(tenant, version, since_ms, tensors)))
    assert (read.tenant, read.version, read.since_ms) == (tenant, version, since_ms)
    assert_same(read.tensors, tensors)
