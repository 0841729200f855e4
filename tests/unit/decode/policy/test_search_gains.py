"""The search of memory beside a fast target: it goes on where its tokens are worth its time, and nowhere else."""

from itertools import count, repeat

import numpy as np
import pytest

from omnidraft.decode.policy.chain import FixedPolicy
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.decode.policy.gains import TRIAL_SHARE
from omnidraft.ports import RoundText, TextOutcome

TENANT = "default"
NUM_NODES = 4


def policy_of(pass_s: float = 1.0) -> CostPolicy:
    return CostPolicy(CostCurve({1: pass_s, 16: 1.6 * pass_s}), CostCurve({1: pass_s}))


def searches(
    policy: CostPolicy, accepted: float, search_s: float, num_rounds: int = 400, tenants=None, num_texts: int = 1
) -> list[bool]:
    """Rounds in which memory drafts four nodes wherever it is searched, of which so many are right on average; return
    in which it was searched."""
    rng, of_rounds, tenants = np.random.default_rng(0), [], tenants or repeat(TENANT)
    for _ in range(num_rounds):
        tenant = next(tenants)
        plan = policy.start_round([RoundText(tenant, 100)] * num_texts)
        is_searched = [plan.should_search(index) for index in range(num_texts)]
        num_right = [NUM_NODES if rng.random() < accepted / NUM_NODES else 0 for _ in is_searched]
        policy.update(
            [
                TextOutcome(tenant, 1 + num, NUM_NODES, [], "text", 0, 0, search_s, NUM_NODES, num)
                if each
                else TextOutcome(tenant, 1, 0, [])
                for each, num in zip(is_searched, num_right, strict=True)
            ]
        )
        of_rounds.append(any(is_searched))
    return of_rounds


@pytest.mark.parametrize("num_texts", [1, 16])
def test_a_search_that_brings_less_than_it_takes_ends_and_costs_next_to_nothing(num_texts):
    policy = policy_of()
    token_s = policy.pass_s(num_texts) / num_texts
    is_searched = searches(policy, 0.0, 0.3 * token_s, num_rounds=800, num_texts=num_texts)
    assert is_searched[0]
    assert np.mean(is_searched[400:]) * 0.3 < 1.5 * TRIAL_SHARE
    assert any(is_searched[400:])


def test_rows_of_memory_count_as_its_time():
    """A sixth of a token is right, in a tenth of a plain token's time; the four rows take another sixth of it."""
    assert np.mean(searches(policy_of(), 0.17, 0.1)[200:]) < 0.5


def test_beside_a_slow_target_memory_is_searched_in_every_round():
    assert all(searches(policy_of(), 0.0, 0.9 * TRIAL_SHARE))


def test_a_search_is_taken_up_again_when_texts_repeat_themselves():
    policy = policy_of()
    searches(policy, 0.0, 0.2)
    assert np.mean(searches(policy, 2.0, 0.2)[200:]) > 0.95


def test_a_hiccup_of_the_clock_ends_no_search():
    policy = policy_of()
    searches(policy, 1.0, 0.1, num_rounds=50)
    searches(policy, 1.0, 10.0, num_rounds=1)
    assert all(searches(policy, 1.0, 0.1))


def test_a_first_search_that_takes_long_does_not_count():
    policy = policy_of()
    searches(policy, 1.0, 10.0, num_rounds=1)
    assert np.mean(searches(policy, 1.0, 0.1)[200:]) > 0.95


def test_fresh_tenants_pay_little_for_a_memory_that_is_never_right():
    is_searched = searches(policy_of(), 0.0, 0.3, tenants=map(str, count()))
    assert 0 < np.mean(is_searched[200:]) < 0.2


def test_one_tenants_losses_do_not_end_the_search_for_another():
    policy = policy_of()
    searches(policy, 1.0, 0.3, tenants=repeat("gains"), num_rounds=100)
    searches(policy, 0.0, 0.3, tenants=repeat("loses"))
    assert np.mean(searches(policy, 1.0, 0.3, tenants=repeat("gains"))) > 0.95


def test_fixed_always_searches():
    assert FixedPolicy().start_round([RoundText(TENANT, 100)]).should_search(0)
