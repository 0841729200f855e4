"""The replay buffer: equal shares for all tasks, bounded, the same for the same seed, and whole after a restart."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.distill.training.replay_buffer import ReplayBuffer


@pytest.fixture(scope="module")
def record(pair):
    return pair.record("r", "Where does the water go?", seed=1)


def of(record, tenant: str, num: int):
    return [replace(record, tenant=tenant, request_id=f"{tenant}{number}") for number in range(num)]


def ids(records) -> list[str]:
    return [each.request_id for each in records]


def test_a_task_of_few_records_is_drawn_as_often_as_one_of_many(record) -> None:
    replay = ReplayBuffer(capacity=100, per_step=2, seed=0)
    replay.add([*of(record, "few", 3), *of(record, "many", 80)], 0)
    drawn = [replay.draw(step) for step in range(200)]
    assert all(sorted(each.tenant for each in pair) == ["few", "many"] for pair in drawn)
    assert len({each.request_id for pair in drawn for each in pair}) > 60


def test_the_largest_task_is_evicted_from_and_its_newest_do_not_push_all_old_ones_out(record) -> None:
    replay = ReplayBuffer(capacity=20, per_step=20, seed=0)
    replay.add(of(record, "old", 10), 0)
    for step, each in enumerate(of(record, "new", 200), 1):
        replay.add([each], step)
    drawn = replay.draw(0)
    assert Counter(each.tenant for each in drawn) == {"old": 10, "new": 10}
    numbers = sorted(int(each.request_id[3:]) for each in drawn if each.tenant == "new")
    assert numbers[0] < 190


def test_nothing_is_stored_when_nothing_is_drawn(record) -> None:
    replay = ReplayBuffer(capacity=9, per_step=0, seed=0)
    replay.add([record], 0)
    assert replay.draw(1) == []
    assert replay.state() == {}


def test_a_restored_buffer_is_as_large_as_the_settings_now_say(record) -> None:
    before = ReplayBuffer(capacity=100, per_step=2, seed=0)
    before.add(of(record, "a", 40), 0)
    smaller = ReplayBuffer(capacity=10, per_step=2, seed=0)
    smaller.load_state(before.state())
    smaller.add(of(record, "b", 1), 1)
    assert sum(smaller.num_records().values()) == 10
    off = ReplayBuffer(capacity=100, per_step=0, seed=0)
    off.load_state(before.state())
    assert off.state() == {}


@settings(max_examples=40)
@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4), max_size=12), st.integers(1, 6), st.integers(0, 12))
def test_a_restored_buffer_goes_on_like_the_one_that_was_never_stopped(record, steps, capacity, stopped_at) -> None:
    def made() -> ReplayBuffer:
        return ReplayBuffer(capacity=capacity, per_step=3, seed=5)

    whole, other = made(), made()
    for step, tenants in enumerate(steps):
        if step == stopped_at:
            saved, other = other.state(), made()
            other.load_state(saved)
        assert ids(other.draw(step)) == ids(whole.draw(step))
        for replay in (whole, other):
            named = enumerate(tenants)
            replay.add([replace(record, tenant=t, request_id=f"{step}{t}{n}") for n, t in named], step)
        drawn = whole.draw(step)
        assert len(set(ids(drawn))) == len(drawn) <= min(3, capacity)
