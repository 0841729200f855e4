"""Policies over a simulated machine: what is drafted pays for itself, and nothing is drafted that does not."""

from dataclasses import dataclass

import numpy as np
import pytest

from omnidraft.decode.policy.chain import AcceptancePolicy, FixedPolicy, ThresholdPolicy
from omnidraft.decode.policy.cost import TRIAL_SHARE, CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.ports import Policy, RoundPlan, RoundText, TextOutcome

TENANT = "default"


@dataclass
class Machine:
    """Passes and steps cost what the curves say; a drafted chain agrees with this chance at every depth."""

    pass_s: CostCurve
    step_s: CostCurve
    agreement: float
    depth: int = 12
    prompt: int = 1
    """Ids that stand before each answer."""
    length: int = 100
    """Tokens of an answer."""

    def rate(self, policy: Policy, num_rounds: int, seed: int = 0) -> float:
        """Tokens per second of the last half of the rounds."""
        rng = np.random.default_rng(seed)
        tokens = seconds = 0.0
        position = read_to = self.length
        for number in range(num_rounds):
            if position >= self.length:
                policy.finish(TENANT, position if number else 0)
                position, read_to = 0, -self.prompt
            emitted, spent, num_steps = self._round(policy, rng, position - read_to)
            if num_steps:
                spent, read_to = spent + self.step_s(position - read_to) - self.step_s(1), position
            position += emitted
            if number >= num_rounds // 2:
                tokens, seconds = tokens + emitted, seconds + spent
        return tokens / seconds

    def _round(self, policy: Policy, rng: np.random.Generator, num_unread: int) -> tuple[int, float, int]:
        """Tokens, seconds but for reading, and the drafter's steps."""
        values: list[float] = []
        plan = policy.start_round([RoundText(TENANT, 2 * self.length)])
        is_drafted = plan.should_draft(0, num_unread)
        while (
            is_drafted
            and len(values) < self.depth
            and plan.select_expansions([values[-1] if values else 1.0], len(values))
        ):
            values.append((values[-1] if values else 1.0) * self.agreement)
        num_nodes = plan.prune(values)
        num_accepted = int(np.argmin([*(rng.random(num_nodes) < self.agreement), False]))
        step_rows = [num_unread, *[1] * (len(values) - 1)] if values else []
        policy.update([TextOutcome(TENANT, num_accepted + 1, num_nodes, step_rows)])
        return num_accepted + 1, self.pass_s(num_nodes + 1) + len(values) * self.step_s(1), len(values)


def flat(one: float, sixteen: float) -> CostCurve:
    return CostCurve({1: one, 16: sixteen})


def alone(policy: CostPolicy) -> RoundPlan:
    """The plan of a round with one text."""
    return policy.start_round([RoundText(TENANT, 100)])


def cost_policy(machine: Machine) -> CostPolicy:
    return CostPolicy(machine.pass_s, machine.step_s)


@pytest.mark.parametrize("agreement", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("step_s", [0.005, 0.03])
@pytest.mark.parametrize("sixteen", [0.19, 0.5])
def test_the_cost_policy_is_as_fast_as_the_best_fixed_depth(agreement, step_s, sixteen):
    machine = Machine(flat(0.18, sixteen), flat(step_s, step_s), agreement)
    best = max(
        (1 - agreement ** (depth + 1)) / (1 - agreement) / (machine.pass_s(depth + 1) + depth * step_s)
        for depth in range(13)
    )
    assert machine.rate(cost_policy(machine), 1000) > 0.92 * best


@pytest.mark.parametrize(
    ("step_s", "sixteen", "agreement"),
    [(0.3, 0.2, 0.9), (0.02, 3.0, 0.4), (0.02, 0.2, 0.02)],
    ids=["slow drafter", "slow passes", "bad drafter"],
)
def test_speculation_that_loses_is_turned_off_and_costs_next_to_nothing(step_s, sixteen, agreement):
    machine = Machine(flat(0.18, sixteen), flat(step_s, step_s), agreement)
    assert machine.rate(cost_policy(machine), 1000) > 0.97 / 0.18


def test_drafts_that_are_never_worth_scoring_are_given_up():
    """A first draft token looks worth a step, and its successors are not worth a row: no later step corrects it."""
    policy = CostPolicy(CostCurve({1: 0.1, 2: 0.14}), flat(0.008, 0.008))
    steps = []
    for _ in range(400):
        plan = policy.start_round([RoundText(TENANT, 400)])
        step_rows = [1] * (plan.should_draft(0, 1) and plan.select_expansions([1.0], 0))
        policy.update([TextOutcome(TENANT, 1, plan.prune([0.3] if step_rows else []), step_rows)])
        steps.append(len(step_rows))
    assert steps[0] == 1
    assert sum(steps[200:]) * 0.008 <= 200 * 0.1 * TRIAL_SHARE


def test_where_no_likely_drafter_pays_the_first_round_is_plain():
    """llama.cpp on AVX2: a second row costs as much as a pass."""
    policy = CostPolicy(CostCurve({1: 0.045, 2: 0.081, 16: 0.36}), flat(0.005, 0.006))
    assert not alone(policy).should_draft(0, 1)


@pytest.mark.parametrize(("prompt", "length"), [(400, 20), (4000, 200), (40, 2)])
def test_a_prompt_that_short_answers_do_not_pay_for_is_not_read(prompt, length):
    machine = Machine(flat(0.05, 0.06), CostCurve({1: 0.005, 64: 0.065}), 0.6, prompt=prompt, length=length)
    assert machine.rate(cost_policy(machine), 2000) > 0.97 / 0.05


def test_a_prompt_that_the_answer_pays_for_is_read():
    machine = Machine(flat(0.05, 0.06), CostCurve({1: 0.005, 64: 0.065}), 0.8, prompt=400, length=200)
    assert machine.rate(cost_policy(machine), 1000) > 1.5 / 0.05


def test_a_drafter_that_recovers_is_taken_up_again():
    machine = Machine(flat(0.18, 0.19), flat(0.02, 0.02), 0.02)
    policy = cost_policy(machine)
    assert machine.rate(policy, 400) < 1.05 / 0.18
    machine.agreement = 0.9
    assert machine.rate(policy, 1000) > 2.5 / 0.18


def test_a_surer_place_is_gone_on_from_where_a_doubtful_one_is_not():
    policy = CostPolicy(flat(0.18, 0.2), flat(0.04, 0.05))
    plan = alone(policy)
    assert plan.select_expansions([0.9], 1) == 1
    assert plan.select_expansions([0.05], 1) == 0


def test_several_places_share_a_step_when_rows_are_cheap():
    cheap = CostPolicy(flat(0.18, 0.19), CostCurve({1: 0.010, 4: 0.011}))
    dear = CostPolicy(flat(0.18, 0.19), CostCurve({1: 0.010, 4: 0.2}))
    assert alone(cheap).select_expansions([0.4, 0.3, 0.3], 3) == 3
    assert alone(dear).select_expansions([0.4, 0.3, 0.3], 3) == 1


def test_nodes_are_kept_until_the_next_costs_more_than_it_brings():
    policy = CostPolicy(CostCurve({1: 0.1, 3: 0.11, 4: 0.3, 5: 0.5}), flat(0.01, 0.01))
    assert alone(policy).prune([0.9, 0.5, 0.4, 0.3]) == 2
    assert alone(policy).prune([]) == 0


def test_threshold_goes_on_while_the_chain_is_likely_and_keeps_its_last_token():
    policy = ThresholdPolicy(0.3)
    assert [policy.select_expansions([value], 1) for value in (1.0, 0.3, 0.29)] == [1, 1, 0]
    assert policy.prune([0.9, 0.1]) == 2


def test_fixed_never_stops_by_itself():
    assert FixedPolicy().select_expansions([1e-9, 0.5], 40) == 2
    assert FixedPolicy().prune([0.1] * 9) == 9


def test_acceptance_stops_once_the_chain_is_doubtful_and_keeps_its_last_token():
    policy = AcceptancePolicy(0.75)
    assert [policy.select_expansions([value], 1) for value in (1.0, 0.25, 0.24)] == [1, 1, 0]
    assert policy.prune([0.9, 0.1]) == 2
