"""Policies over a simulated machine: what is drafted pays for itself, and nothing is drafted that does not."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice, repeat

import numpy as np
import pytest

from omnidraft.decode.drafting.drafter_session import LAST_IDS
from omnidraft.decode.policy.chain import AcceptancePolicy, FixedPolicy, ThresholdPolicy
from omnidraft.decode.policy.cost import CostPlan, CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.decode.policy.gains import TRIAL_SHARE
from omnidraft.ports import NO_OTHERS, OtherTexts, RoundPlan, RoundText, TextOutcome

TENANT = "default"


@dataclass
class Machine:
    """Answers one request after another. Passes and steps cost what the curves say; a drafted chain agrees with this
    chance at every depth."""

    pass_s: CostCurve
    step_s: CostCurve
    agreement: float
    depth: int = 12
    prompt: int = 1
    """Ids that stand before each answer."""
    length: int = 100
    """Tokens of an answer."""
    limit: int | None = None
    """The tokens that a request allows; None: twice as many as it gets."""
    num_read: int = 0
    """Prompts that the drafter read the whole of."""

    def rate(self, policy: CostPolicy, num_rounds: int) -> float:
        """Tokens per second of the last half of the rounds."""
        rounds = list(islice(self.rounds(policy, repeat(TENANT)), num_rounds))
        tokens, seconds = zip(*rounds[num_rounds // 2 :], strict=True)
        return sum(tokens) / sum(seconds)

    def rounds(self, policy: CostPolicy, tenants: Iterable[str]) -> Iterator[tuple[int, float]]:
        """Tokens and seconds of each round of an answer to each of these tenants."""
        rng = np.random.default_rng(0)
        for tenant in tenants:
            position, read_to = 0, -self.prompt
            while position < self.length:
                plan = policy.start_round([RoundText(tenant, self.limit or 2 * self.length)])
                num_unread = position - read_to
                is_whole = num_unread <= LAST_IDS or plan.should_read(0, num_unread, LAST_IDS)
                num_ids = num_unread if is_whole else LAST_IDS
                values = self._values(plan) if plan.should_draft(0, num_ids) else []
                num_nodes = plan.prune(values)
                num_right = int(np.argmin([*(rng.random(num_nodes) < self.agreement), False]))
                num_emitted = min(1 + num_right, self.length - position)
                step_rows = [num_ids, *[1] * (len(values) - 1)] if values else []
                policy.update([TextOutcome(tenant, num_emitted, num_nodes, step_rows)])
                if values:
                    self.num_read += read_to < 0 and is_whole
                    read_to = position
                position += num_emitted
                pass_s = self.pass_s(1 + num_nodes)
                yield num_emitted, pass_s + sum(map(self.step_s, step_rows))
                self.pass_s.update(1 + num_nodes, pass_s)
                for rows in step_rows:
                    self.step_s.update(rows, self.step_s(rows))
            policy.finish(tenant, position)

    def _values(self, plan: RoundPlan) -> list[float]:
        """The values of the nodes that steps add."""
        values = [1.0]
        while len(values) <= self.depth and plan.select_expansions(values[-1:], len(values) - 1):
            values.append(values[-1] * self.agreement)
        return values[1:]


def flat(one: float, sixteen: float) -> CostCurve:
    return CostCurve({1: one, 16: sixteen})


def alone(policy: CostPolicy) -> RoundPlan:
    """The plan of a round with one text."""
    return policy.start_round([RoundText(TENANT, 100)])


def cost_policy(machine: Machine) -> CostPolicy:
    return CostPolicy(machine.pass_s, machine.step_s)


@pytest.mark.parametrize(
    ("agreement", "step_s", "sixteen"),
    [(0.3, 0.005, 0.19), (0.3, 0.03, 0.5), (0.5, 0.005, 0.5), (0.7, 0.03, 0.19), (0.9, 0.005, 0.5), (0.9, 0.03, 0.19)],
)
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
        for rows in step_rows:
            policy.step_s.update(rows, 0.008)
        steps.append(len(step_rows))
    assert steps[0] == 1
    assert sum(steps[200:]) * 0.008 <= 200 * 0.1 * TRIAL_SHARE


def test_where_no_likely_drafter_pays_the_first_round_is_plain():
    """llama.cpp on AVX2: a second row costs as much as a pass."""
    policy = CostPolicy(CostCurve({1: 0.045, 2: 0.081, 16: 0.36}), flat(0.005, 0.006))
    assert not alone(policy).should_draft(0, 1)


@pytest.mark.parametrize(("prompt", "length"), [(400, 20), (40, 2)])
def test_a_prompt_that_short_answers_do_not_pay_for_is_not_read(prompt, length):
    machine = Machine(flat(0.05, 0.06), CostCurve({1: 0.005, 64: 0.065}), 0.6, prompt=prompt, length=length)
    assert machine.rate(cost_policy(machine), 2000) > 0.97 / 0.05


@pytest.mark.parametrize("length", [1, 3])
def test_trials_cost_no_more_where_answers_end_before_they_do(length):
    """Each answer of a trial has a prompt of its own, which the drafter reads."""
    machine = Machine(flat(0.05, 0.06), CostCurve({1: 0.005, 64: 0.065}), 0.02, prompt=60, length=length)
    assert machine.rate(cost_policy(machine), 3000) > 0.97 / 0.05


def test_a_prompt_that_the_answer_pays_for_is_read():
    machine = Machine(flat(0.05, 0.06), CostCurve({1: 0.005, 64: 0.065}), 0.8, prompt=400, length=200)
    assert machine.rate(cost_policy(machine), 1000) > 1.5 / 0.05


def test_a_drafter_that_recovers_after_good_times_and_bad_ones_is_taken_up_again():
    """The gain of the good times is still expected when a further step is not worth a thing any more."""
    machine = Machine(flat(0.18, 0.19), flat(0.02, 0.02), 0.8)
    policy = cost_policy(machine)
    for agreement in (0.8, 0.02):
        machine.agreement = agreement
        machine.rate(policy, 400)
    machine.agreement = 0.9
    assert machine.rate(policy, 1000) > 2.5 / 0.18


def test_a_step_that_looks_too_dear_at_first_is_tried():
    machine = Machine(flat(0.18, 0.19), flat(0.1, 0.1), 0.9)
    assert machine.rate(cost_policy(machine), 2000) > 1.1 / 0.18


def test_a_step_that_pays_for_many_texts_together_is_taken():
    policy = CostPolicy(flat(1.0, 1.3), CostCurve({1: 0.2, 64: 0.3}))
    plan = policy.start_round([RoundText(TENANT, 500)] * 8)
    assert plan.select_expansions([1.0], 0) == 0
    assert all(plan.should_draft(at, 2) for at in range(8))


def test_a_step_that_pays_beside_the_nodes_of_a_memory_is_taken():
    """The second row costs nearly a pass, and further ones nothing."""
    policy = CostPolicy(CostCurve({1: 1.0, 2: 1.8, 32: 2.1}), flat(0.02, 0.02))
    assert not alone(policy).should_draft(0, 2)
    policy.update([TextOutcome(TENANT, 2, 3, [], num_nodes_without=3, num_accepted_without=1)])
    assert alone(policy).should_draft(0, 2)


@pytest.mark.parametrize(
    ("pass_s", "num_plain"), [(flat(1.0, 1.2), 12), (CostCurve({6: 1.0}), 0)], ids=["any size", "padded"]
)
def test_one_round_in_33_measures_a_plain_pass_unless_all_passes_have_one_size(pass_s, num_plain):
    """After 4, 8 and 16 rounds with drafts at first."""
    policy, num_nodes = CostPolicy(pass_s, flat(0.05, 0.05)), []
    for _ in range(330):
        plan = alone(policy)
        step_rows = [1] * plan.should_draft(0, 2)
        num_nodes.append(plan.prune([0.9, 0.8]))
        assert len(step_rows) == (num_nodes[-1] > 0)
        policy.update([TextOutcome(TENANT, 1 + num_nodes[-1], num_nodes[-1], step_rows)])
    assert num_nodes.count(0) == num_plain


def test_beside_steady_prompts_passes_with_drafts_are_measured_too():
    """Every 32nd round reads no prompt, so that its pass can be measured."""
    policy, measured = CostPolicy(flat(1.0, 1.2), flat(0.05, 0.05)), []
    for _ in range(6):
        for others in [OtherTexts(num_prompt_rows=8)] * 32 + [OtherTexts()]:
            num_nodes = policy.start_round([RoundText(TENANT, 500)], others).prune([0.9])
            policy.update([TextOutcome(TENANT, 2, num_nodes, [])], others)
        measured.append(num_nodes)
    assert measured == [1, 0, 1, 0, 1, 0]


def test_a_plain_pass_is_measured_only_where_no_prompt_is_read_beside_it():
    policy, others = CostPolicy(flat(1.0, 1.2), flat(0.05, 0.05)), OtherTexts(num_prompt_rows=8)
    policy.update([TextOutcome(TENANT, 2, 1, [])])
    for _ in range(40):
        assert policy.start_round([RoundText(TENANT, 500)], others).prune([0.9]) == 1
        policy.update([TextOutcome(TENANT, 2, 1, [])], others)
        policy.update([TextOutcome(TENANT, 1, 0, [])], others)
    assert alone(policy).prune([0.9]) == 0
    policy.update([TextOutcome(TENANT, 1, 0, [])])
    assert alone(policy).prune([0.9]) == 1


def test_several_places_share_a_step_when_rows_are_cheap():
    cheap = CostPolicy(flat(0.18, 0.19), CostCurve({1: 0.010, 4: 0.011}))
    dear = CostPolicy(flat(0.18, 0.19), CostCurve({1: 0.010, 4: 0.2}))
    assert alone(cheap).select_expansions([0.4, 0.3, 0.3], 3) == 3
    assert alone(dear).select_expansions([0.4, 0.3, 0.3], 3) == 1


@pytest.mark.parametrize(
    ("policy", "values", "num_rows"),
    [
        (ThresholdPolicy(0.3), (1.0, 0.3, 0.29), [1, 1, 0]),
        (AcceptancePolicy(0.75), (1.0, 0.25, 0.24), [1, 1, 0]),
        (FixedPolicy(), (1.0, 0.1, 1e-9), [1, 1, 1]),
    ],
    ids=["threshold", "acceptance", "fixed"],
)
def test_a_chain_goes_on_while_it_is_likely_and_keeps_its_last_token(policy, values, num_rows):
    assert [policy.select_expansions([value], 1) for value in values] == num_rows
    assert policy.prune([0.9, 0.1]) == 2


# ---------------------------------------------------------------- many texts


def plan_of(pass_s, step_s=lambda rows: 0.001, num_texts: int = 2, others: OtherTexts = NO_OTHERS) -> CostPlan:
    return CostPolicy(pass_s, step_s).start_round([RoundText(TENANT, 100)] * num_texts, others)


@pytest.mark.parametrize(
    ("pass_s", "values", "num_kept"),
    [
        (lambda rows: 1.0, [0.9, 0.5, 0.1, 0.01], 4),
        (float, [0.9, 0.5], 0),
        (lambda rows: 1.0 + 0.2 * max(rows - 2, 0), [0.9, 0.5, 0.3, 0.2], 2),
        (lambda rows: 1.0, [], 0),
    ],
    ids=["free rows", "rows that cost a pass", "a fifth of a pass for two", "nothing drafted"],
)
def test_of_two_texts_the_nodes_are_kept_that_are_likelier_than_what_their_time_gives(pass_s, values, num_kept):
    assert plan_of(pass_s).prune(values) == num_kept


def knee(rows: int) -> float:
    """Sixteen rows for the price of one, then the full price of arithmetic."""
    return 1.0 + max(rows - 16, 0) / 16


@pytest.mark.parametrize(
    ("pass_s", "acceptances", "num_kept"),
    [(knee, None, 62), (knee, [0.97] * 62, 15), (lambda rows: 1.0 + rows / 200, [0.97] * 62, 62)],
    ids=["a chain for this pass alone", "one that the next pass goes on with", "rows that cost little"],
)
def test_what_the_next_pass_will_be_as_sure_of_waits_for_it_where_rows_are_dear(pass_s, acceptances, num_kept):
    values = [0.97**depth for depth in range(1, 63)]
    policy = CostPolicy(pass_s, lambda rows: 0.001)
    for _ in range(20):
        policy.update([TextOutcome(TENANT, 3, 8, [])])
    policy.update([TextOutcome(TENANT, 1, 0, [])])
    assert policy.start_round([RoundText(TENANT, 100)]).prune(values, acceptances) == num_kept


def test_drafting_fades_out_as_texts_fill_the_pass():
    """Likely nodes of every text: the more texts, the fewer of each, and none where a row costs what it brings."""
    num_nodes = {}
    for num_texts in (1, 4, 8, 16, 32):
        values = sorted([0.8, 0.6, 0.5, 0.3] * num_texts, reverse=True)
        num_nodes[num_texts] = plan_of(knee, num_texts=num_texts).prune(values)
    assert num_nodes == {1: 4, 4: 16, 8: 16, 16: 0, 32: 0}


def test_rows_of_prompts_leave_fewer_to_drafts():
    """Four texts have rows for free, and beside a prompt that takes those only likely nodes pay."""
    values = sorted([0.8, 0.2] * 4, reverse=True)
    assert [plan_of(knee, num_texts=4, others=OtherTexts(0, 0, rows)).prune(values) for rows in (0, 16, 200)] == [
        8,
        4,
        4,
    ]


def test_texts_that_are_not_drafted_for_share_the_pass_and_need_it():
    """Two of sixteen have drafts: what a row of theirs adds to the pass, all sixteen wait for."""
    num_nodes = [plan_of(knee, others=OtherTexts(num_texts)).prune([0.8] * 4) for num_texts in (0, 2, 14)]
    assert num_nodes == [4, 4, 0]


def test_a_drafter_does_not_read_a_text_alone_that_others_will_decode_beside():
    """As when eight come at once: the first has been read, and the prompts of seven are being read."""
    reads = [
        plan_of(CostCurve({1: 1.0}), CostCurve({1: 0.1, 64: 6.4}), 1, OtherTexts(0, num_prompts, 40)).should_draft(
            0, 100
        )
        for num_prompts in (0, 7)
    ]
    assert reads == [True, False]


def test_a_text_that_decodes_beside_prompts_keeps_its_drafts():
    """Nobody else decodes before they have been read."""
    beside = [OtherTexts(0, num_prompts, 40) for num_prompts in (1, 7)]
    plans = [plan_of(lambda rows: 1.0 + 0.02 * rows, lambda rows: 0.1, 1, others) for others in beside]
    assert [plan.should_draft(0, 1) for plan in plans] == [True, True]
    assert [plan.prune([0.8, 0.5]) for plan in plans] == [2, 2]


def simulate(
    policy: CostPolicy,
    agreement: dict[str, float],
    num_rounds: int,
    depth: int = 6,
    num_each: int = 2,
    true_s: Callable[[int], float] | None = None,
    num_unread: int = 2,
) -> dict[str, list[int]]:
    """Rounds in which each tenant has some texts, whose drafted tokens all look as likely; return the number of nodes
    of each tenant by round.

    Args:
        true_s: the seconds of passes where they are not those that the policy knows, which each pass corrects.
        num_unread: ids that a text has for a drafter that did not draft for it in the last round.
    """
    rng, tenants = np.random.default_rng(0), [tenant for tenant in agreement for _ in range(num_each)]
    nodes: dict[str, list[int]] = {tenant: [] for tenant in agreement}
    drafting: list[int] = []
    for _ in range(num_rounds):
        plan = policy.start_round([RoundText(tenant, 500) for tenant in tenants])
        unread = [2 if at in drafting else num_unread for at in range(len(tenants))]
        drafting = [at for at in range(len(tenants)) if plan.should_draft(at, unread[at])]
        lengths, steps = [0] * len(tenants), []
        while drafting and len(steps) < depth:
            num = plan.select_expansions([0.7 ** len(steps)] * len(drafting), sum(lengths))
            if not num:
                break
            steps.append([at in drafting[:num] for at in range(len(tenants))])
            for at in drafting[:num]:
                lengths[at] += 1
        values = sorted((0.7**number, at) for at in range(len(tenants)) for number in range(1, lengths[at] + 1))[::-1]
        scored = [at for _, at in values[: plan.prune([value for value, _ in values])]]
        outcomes = []
        for at, tenant in enumerate(tenants):
            accepted = int(np.argmin([*(rng.random(scored.count(at)) < agreement[tenant]), False]))
            rows = [int(step[at]) for step in steps]
            outcomes.append(TextOutcome(tenant, accepted + 1, scored.count(at), rows))
        policy.update(outcomes)
        policy.pass_s.update(len(tenants) + len(scored), (true_s or policy.pass_s)(len(tenants) + len(scored)))
        read = [unread[at] for at in drafting] if steps else []
        for rows in [sum(read), *map(sum, steps[1:])] if steps else []:
            policy.step_s.update(rows, policy.step_s(rows))
        for tenant in agreement:
            nodes[tenant].append(sum(outcome.num_nodes for outcome in outcomes if outcome.tenant == tenant))
    return nodes


def test_losses_with_one_kind_of_request_do_not_stop_the_gains_of_another():
    """A tenant whose free text is never drafted right, and whose text under grammars always is."""
    policy, gains, loses = CostPolicy(flat(1.0, 1.6), flat(0.05, 0.05)), [], []
    for _ in range(300):
        plan = policy.start_round([RoundText(TENANT, 500, "text"), RoundText(TENANT, 500, "constrained")])
        is_drafted = [plan.should_draft(at, 2) for at in range(2)]
        num_nodes = [3 * each for each in is_drafted]
        policy.update(
            [
                TextOutcome(TENANT, 1, num_nodes[0], num_nodes, "text"),
                TextOutcome(TENANT, 1 + num_nodes[1], num_nodes[1], [0, num_nodes[1]], "constrained"),
            ]
        )
        loses.append(is_drafted[0])
        gains.append(is_drafted[1])
    assert np.mean(gains) > 0.95  # all but the rounds that measure plain passes
    assert np.mean(loses[100:]) < 0.2
    assert policy.streams.of(TENANT, "constrained", 2).gain > 1
    assert policy.streams.of(TENANT, "text", 2).gain < 0
    assert policy.streams.of(TENANT, "tools", 2).num_drafted == 0


def rounds_beside_memory(policy: CostPolicy, num_nodes: int, num_more: int, num_steps: int) -> list[bool]:
    """300 rounds in which memory drafts so many nodes, all right but one, and the drafter more in so many steps, all
    right; return whether it drafted in each."""
    is_drafted: list[bool] = []
    for _ in range(300):
        plan = alone(policy)
        is_drafted.append(plan.should_draft(0, 2))
        without = num_nodes if plan.prune([0.9]) else 0  # none in a round that measures a plain pass
        more, step_rows = (num_more, [1] * num_steps) if is_drafted[-1] else (0, [])
        num_accepted = max(without - 1, 0)
        policy.update(
            [TextOutcome(TENANT, 1 + num_accepted + more, without + more, step_rows, "text", without, num_accepted)]
        )
        policy.pass_s.update(1 + without + more, policy.pass_s(1 + without + more))
        for rows in step_rows:
            policy.step_s.update(rows, policy.step_s(rows))
    return is_drafted


def test_a_drafter_beside_memory_is_kept_for_what_it_adds():
    policy = CostPolicy(flat(1.0, 1.6), flat(0.05, 0.05))
    assert np.mean(rounds_beside_memory(policy, 4, 2, 2)) > 0.95  # all but the rounds that measure plain passes
    memory_rate = 4 / (1 + 4 * 0.04)
    assert policy.streams.of(TENANT).gain == pytest.approx(2 - memory_rate * (2 * 0.04 + 2 * 0.05), abs=0.1)


def test_a_drafter_is_given_up_where_memory_uses_its_time_better_though_plain_decoding_would_not():
    """Memory gives 4 tokens a pass; the drafter adds one in half the time of a plain pass, in which memory says two."""
    is_drafted = rounds_beside_memory(CostPolicy(flat(1.0, 1.6), flat(0.05, 0.05)), 4, 1, 10)
    assert is_drafted[0]
    assert np.mean(is_drafted[50:]) < 0.25


def test_a_trial_reads_the_end_of_a_long_text_and_never_the_whole():
    policy = CostPolicy(flat(0.055, 0.17), CostCurve({1: 0.005, 64: 0.074}))
    policy.streams.of(TENANT).gain = -0.1
    policy.streams.payer(TENANT).idle_s = 15.0
    for _ in range(2):  # the trial begins, and goes on
        plan = policy.start_round([RoundText(TENANT, 500)])
        assert not plan.should_read(0, 300, 64)
        assert plan.should_draft(0, 64)


AMX_PASSES = {1: 54.6, 2: 58.1, 4: 61.2, 6: 64.5, 8: 66.2, 12: 71.0, 16: 75.1, 24: 92.1, 32: 110.6}
AMX_STEPS = {1: 4.2, 2: 4.2, 4: 4.7, 64: 17.9}
"""Milliseconds of a 1.5B target in 8 bits and of a 135M drafter."""


def test_rows_that_are_far_dearer_than_they_were_end_drafting():
    """Each pass corrects what is known of it, and a few plain ones must not undo what many drafted ones correct."""
    policy = CostPolicy(CostCurve(AMX_PASSES), CostCurve(AMX_STEPS))
    nodes = simulate(policy, {TENANT: 0.75}, 1500, 12, num_each=4, true_s=lambda rows: 55 + 35 * (rows - 1))
    assert np.mean(np.array(nodes[TENANT][1000:]) > 0) < 0.3


@pytest.mark.parametrize("num_texts", [8, 16])
def test_a_trial_of_one_among_many_texts_shows_what_drafting_for_all_would_gain(num_texts):
    policy = CostPolicy(CostCurve(AMX_PASSES), CostCurve(AMX_STEPS))
    nodes = simulate(policy, {TENANT: 0.02}, 800, num_each=num_texts, num_unread=64)
    assert np.mean(np.array(nodes[TENANT][400:]) > 0) < 0.2
    nodes = simulate(policy, {TENANT: 0.75}, 1500, num_each=num_texts, num_unread=64)
    assert np.mean(nodes[TENANT][1200:]) > num_texts / 2


def test_for_a_trial_only_the_first_text_of_a_tenant_is_read():
    policy = CostPolicy(flat(1.0, 1.6), CostCurve({1: 0.05, 64: 0.8}))
    policy.streams.of(TENANT, num_texts=3).gain = -0.1
    policy.streams.payer(TENANT, num_texts=3).idle_s = 1e6
    plan = policy.start_round([RoundText(TENANT, 100)] * 3)
    assert [plan.should_draft(at, num_ids) for at, num_ids in enumerate([500, 500, 2])] == [True, False, True]
    assert plan.select_expansions([0.01, 0.01], 0) == 1
    assert plan.prune([0.001]) == 1


def test_many_texts_are_not_read_for_what_the_drafter_gained_for_few():
    """Rows are free for two texts and dear for sixteen, whose prompts the drafter would read to draft nothing."""
    policy = CostPolicy(CostCurve({1: 1.0, 8: 1.0, 16: 1.4, 32: 2.4}), CostCurve({1: 0.05, 64: 0.4}))
    simulate(policy, {TENANT: 0.8}, 200)
    few, many = [policy.start_round([RoundText(TENANT, 100)] * num_texts) for num_texts in (2, 16)]
    assert few.should_draft(0, 64)
    assert not any(many.should_draft(at, 64) for at in range(16))


# ---------------------------------------------------------------- many tenants


def server(agreement: float, prompt: int, length: int) -> tuple[Machine, CostPolicy]:
    """A pass takes a second, a drafter step 0.1 and 0.02 more for each id that it reads, as is seen in all of them."""
    passes, steps = CostCurve({1: 1.0}), CostCurve({1: 0.1, 2: 0.12, 4: 0.16, 64: 1.36})
    return Machine(passes, steps, agreement, 6, prompt, length, limit=500), CostPolicy(passes, steps)


def seconds(machine: Machine, policy: CostPolicy, tenants: Iterator[str], num_answers: int) -> float:
    """The seconds of so many answers, as a multiple of those without drafting."""
    spent = sum(spent_s for _, spent_s in machine.rounds(policy, islice(tenants, num_answers)))
    return spent / (num_answers * machine.length)


def fresh() -> Iterator[str]:
    """A tenant for each request."""
    return map(str, count())


def test_fresh_tenants_cost_as_much_as_one_that_stays():
    """Their answers are too short for their prompts, which the first ones have shown."""
    (of_one, one_policy), (of_fresh, policy) = server(0.5, 500, 8), server(0.5, 500, 8)
    assert seconds(of_fresh, policy, fresh(), 200) < seconds(of_one, one_policy, repeat("one"), 200) + 0.02
    assert of_fresh.num_read < of_one.num_read + 10


def test_fresh_tenants_pay_little_for_a_drafter_that_is_never_right():
    machine, policy = server(0.02, 500, 8)
    seconds(machine, policy, fresh(), 100)
    assert seconds(machine, policy, fresh(), 200) < 1.03


def test_fresh_tenants_take_drafting_up_again_when_it_recovers():
    """None of them waits long enough for a trial of its own."""
    machine, policy = server(0.02, 8, 20)
    seconds(machine, policy, fresh(), 200)
    machine.agreement = 0.9
    seconds(machine, policy, fresh(), 400)
    assert seconds(machine, policy, fresh(), 100) < 0.6


def test_what_one_tenant_lost_does_not_end_the_gains_of_another():
    machine, policy = server(0.9, 8, 20)
    seconds(machine, policy, repeat("gains"), 50)
    gains_alone = seconds(machine, policy, repeat("gains"), 50)
    machine.agreement = 0.02
    seconds(machine, policy, repeat("loses"), 200)
    assert policy.streams.of(None).gain < 0
    machine.agreement = 0.9
    assert seconds(machine, policy, repeat("gains"), 50) < gains_alone + 0.05
