"""The cost policy over the answers of many tenants: what one of them shows is where the next begins."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, repeat

import numpy as np

from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.ports import RoundPlan, RoundText, TextOutcome

PASS_S = 1.0
STEPS = {1: 0.1, 2: 0.12, 4: 0.16, 64: 1.36}
LAST_IDS = 64


@dataclass
class Server:
    """Answers one request after another. A pass takes a second, a drafter step 0.1 and 0.02 more for each id that it
    reads, as is seen in all of them; drafts are right this often."""

    agreement: float = 0.5
    prompt: int = 500
    length: int = 8
    policy: CostPolicy = field(init=False)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    num_read: int = 0
    """Prompts that the drafter read the whole of."""

    def __post_init__(self) -> None:
        self.pass_s, self.step_s = CostCurve({1: PASS_S}), CostCurve(STEPS)
        self.policy = CostPolicy(self.pass_s, self.step_s)

    def answer_all(self, tenants: Iterator[str], num_requests: int) -> float:
        """Return the seconds of so many answers, as a multiple of those without drafting."""
        seconds = sum(self._answer(next(tenants)) for _ in range(num_requests))
        return seconds / (num_requests * self.length * PASS_S)

    def _answer(self, tenant: str) -> float:
        position, read_to, seconds = 0, -self.prompt, 0.0
        while position < self.length:
            plan = self.policy.start_round([RoundText(tenant, 500)])
            num_unread = position - read_to
            is_whole = num_unread <= LAST_IDS or plan.should_read(0, num_unread, LAST_IDS)
            num_ids = num_unread if is_whole else LAST_IDS
            num_steps = self._num_steps(plan) if plan.should_draft(0, num_ids) else 0
            num_nodes = plan.prune([self.agreement**depth for depth in range(1, num_steps + 1)])
            num_right = int(np.argmin([*(self.rng.random(num_nodes) < self.agreement), False]))
            num_emitted = min(1 + num_right, self.length - position)
            step_rows = [num_ids, *[1] * (num_steps - 1)] if num_steps else []
            self.policy.update([TextOutcome(tenant, num_emitted, num_nodes, step_rows)])
            if num_steps:
                self.num_read += read_to < 0 and num_ids == num_unread
                read_to = position
            position += num_emitted
            seconds += PASS_S + sum(map(self.step_s, step_rows))
            self.pass_s.update(1 + num_nodes, PASS_S)
            for rows in step_rows:
                self.step_s.update(rows, self.step_s(rows))
        self.policy.finish(tenant, position)
        return seconds

    def _num_steps(self, plan: RoundPlan) -> int:
        num_steps = 0
        while num_steps < 6 and plan.select_expansions([self.agreement**num_steps], num_steps):
            num_steps += 1
        return num_steps


def fresh() -> Iterator[str]:
    """A tenant for each request."""
    return map(str, count())


def test_fresh_tenants_cost_as_much_as_one_that_stays():
    """Their answers are too short for their prompts, which the first ones have shown."""
    of_one, of_fresh = Server(), Server()
    seconds = of_one.answer_all(repeat("one"), 200)
    assert of_fresh.answer_all(fresh(), 200) < seconds + 0.02
    assert of_fresh.num_read < of_one.num_read + 10


def test_fresh_tenants_pay_little_for_a_drafter_that_is_never_right():
    server = Server(agreement=0.02)
    server.answer_all(fresh(), 100)
    assert server.answer_all(fresh(), 200) < 1.03


def test_fresh_tenants_take_drafting_up_again_when_it_recovers():
    """None of them waits long enough for a trial of its own."""
    server = Server(agreement=0.02, prompt=8, length=20)
    server.answer_all(fresh(), 200)
    server.agreement = 0.9
    server.answer_all(fresh(), 400)
    assert server.answer_all(fresh(), 100) < 0.6


def test_what_one_tenant_lost_does_not_end_the_gains_of_another():
    server = Server(agreement=0.9, prompt=8, length=20)
    server.answer_all(repeat("gains"), 50)
    gains_alone = server.answer_all(repeat("gains"), 50)
    server.agreement = 0.02
    server.answer_all(repeat("loses"), 200)
    assert server.policy.streams.of(None).gain < 0
    server.agreement = 0.9
    assert server.answer_all(repeat("gains"), 50) < gains_alone + 0.05
