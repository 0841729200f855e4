"""Costs of passes and steps: measured on models, interpolated between sizes, updated when the machine changes."""

import pytest

from omnidraft.decode.policy import cost_measurement
from omnidraft.decode.policy.cost_measurement import CostFile, measure_steps
from omnidraft.decode.policy.cost_model import CostCurve, MeasuredCosts
from omnidraft.ports import TreeLimits
from omnidraft.testing.toy_models import ToyDrafter, ToyTable, ToyTarget, ToyTargetSession

TABLE = ToyTable.random(30, seed=1)


class Clock:
    """Time passes only while something sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def _a_clock_that_no_other_load_advances(monkeypatch):
    monkeypatch.setattr(cost_measurement, "time", Clock())


class Slow(ToyTarget):
    """A pass takes 2 ms and 2 ms more per row."""

    def open(self, prompt_ids, max_new_tokens, mode):
        class Session(ToyTargetSession):
            def _score(self, tree):
                cost_measurement.time.sleep(0.002 * (1 + len(tree)))
                return super()._score(tree)

        return Session(self, prompt_ids[:-1], len(prompt_ids) + max_new_tokens)


def test_between_two_sizes_and_beyond_the_last_the_line_goes_on():
    curve = CostCurve({1: 1.0, 3: 2.0})
    assert curve(2) == pytest.approx(1.5)
    assert curve(5) == pytest.approx(3.0)
    assert CostCurve({6: 2.0})(1) == CostCurve({6: 2.0})(60) == pytest.approx(2.0)


def test_more_rows_are_never_cheaper():
    curve = CostCurve({1: 1.0, 2: 0.7, 4: 2.0})
    assert [curve(rows) for rows in (1, 2, 4)] == pytest.approx([1.0, 1.0, 2.0])


def test_a_machine_that_became_slower_is_followed_at_every_size():
    curve = CostCurve({1: 1.0, 8: 2.0})
    for _ in range(60):
        curve.update(8, 4.0)
    assert curve(8) == pytest.approx(4.0, rel=0.05)
    assert curve(1) > 1.2


@pytest.mark.parametrize("num_seen", [0, 1, 30])
def test_a_hiccup_is_forgotten_after_a_few_passes(num_seen):
    curve = CostCurve({1: 1.0, 8: 2.0})
    for seconds in (*[1.0] * num_seen, 50.0, 1.0, 1.0):
        curve.update(1, seconds)
    assert curve(1) == pytest.approx(1.0, rel=0.1)
    assert curve(8) == pytest.approx(2.0, rel=0.1)


class Counting(Slow):
    """Keeps the number of rows of every pass; `pace` makes them all slower."""

    def __init__(self, pace: float = 1.0, limits: TreeLimits | None = None) -> None:
        super().__init__(TABLE, limits=limits or TreeLimits(7))
        self.passes: list[int] = []
        self.pace = pace

    def open(self, prompt_ids, max_new_tokens, mode):
        target = self

        class Session(ToyTargetSession):
            def _score(self, tree):
                target.passes.append(len(tree))
                cost_measurement.time.sleep(0.004 * target.pace * (1 + len(tree)))
                return super()._score(tree)

        return Session(self, prompt_ids[:-1], len(prompt_ids) + max_new_tokens)


class Padded(Counting):
    """Passes of reproducible mode are others than those of fast mode."""

    def limits(self, mode):
        return TreeLimits(3) if mode == "reproducible" else super().limits(mode)


def test_a_mode_is_not_measured_where_its_passes_are_those_of_a_measured_one():
    target, padded = Counting(), Padded()
    costs, others = MeasuredCosts(target), MeasuredCosts(padded)
    fast, num_passes = costs.passes("fast"), len(target.passes)
    assert costs.passes("reproducible") is costs.measured("reproducible") is fast
    assert len(target.passes) == num_passes
    assert others.passes("fast") is not others.passes("reproducible")
    assert len(padded.passes) > num_passes


def test_passes_of_any_size_are_measured_where_only_the_leaves_of_a_tree_are_limited():
    few_leaves = Counting(limits=TreeLimits(7, num_chains=2))
    MeasuredCosts(few_leaves).passes("fast")
    assert len(set(few_leaves.passes)) > 1
    few_leaves.passes.clear()
    MeasuredCosts(few_leaves).passes("reproducible")
    assert set(few_leaves.passes) == {8}


def test_modes_of_the_same_passes_have_one_curve_whichever_was_measured():
    costs, others = MeasuredCosts(ToyTarget(TABLE, limits=TreeLimits(3))), MeasuredCosts(Padded())
    fast = costs.passes("fast")
    assert costs.measured("reproducible") is fast
    before = fast(4)
    costs.update_pass("reproducible", 4, 10 * before)
    assert fast(4) > before
    others.passes("fast")
    assert others.measured("reproducible") is None


def test_costs_measured_on_a_busy_machine_are_scaled_while_it_is_busy_and_measured_anew_after(tmp_path):
    def start(pace: float) -> set[int]:
        target = Counting(pace)
        assert MeasuredCosts(target, CostFile(tmp_path / "costs.json")).passes("fast")(1) > 0.007 * pace
        return set(target.passes)

    everything = {1, 2, 4, 6, 8}
    assert [start(pace) for pace in (3, 9, 1, 1)] == [everything, {1, 4, 6}, everything, {1, 4, 6}]


@pytest.mark.parametrize("num_right", [1, 4])
def test_costs_of_which_only_further_rows_are_wrong_are_measured_anew_once(tmp_path, num_right):
    """As after a start with other kernels, or one that another program disturbed from the second size on."""
    file = CostFile(tmp_path / "costs.json")
    expected = MeasuredCosts(Counting(), file).passes("fast")(8)
    file.write("fast", {rows: each * (4 if rows > num_right else 1) for rows, each in file.read("fast").items()})
    starts = [Counting(), Counting()]
    curves = [MeasuredCosts(target, file).passes("fast") for target in starts]
    assert [curve(8) for curve in curves] == pytest.approx([expected, expected])
    assert [set(target.passes) for target in starts] == [{1, 2, 4, 6, 8}, {1, 4, 6}]


@pytest.mark.parametrize("disturbed", range(5))
def test_load_in_intervals_of_as_many_passes_as_there_are_sizes_hides_no_size(disturbed):
    """As a probe that asked a starting worker three times a second did: 24 rows counted as dear as 40."""

    class Probed(ToyTarget):
        def open(self, prompt_ids, max_new_tokens, mode):
            class Session(ToyTargetSession):
                num_passes = 0

                def _score(self, tree):
                    is_disturbed = self.num_passes % 5 == disturbed
                    self.num_passes += 1
                    cost_measurement.time.sleep(0.002 * (1 + len(tree)) + 0.03 * is_disturbed)
                    return super()._score(tree)

            return Session(self, prompt_ids[:-1], len(prompt_ids) + max_new_tokens)

    rows = [1, 2, 4, 6, 8]
    curves = [MeasuredCosts(each(TABLE, limits=TreeLimits(8))).passes("fast") for each in (Slow, Probed)]
    slow, probed = ([curve(each) for each in rows] for curve in curves)
    assert probed == pytest.approx(slow)


def test_a_plain_pass_and_one_with_drafts_tell_that_further_rows_are_cheaper_than_measured():
    curve = CostCurve({1: 1.0, 2: 1.8, 4: 3.4, 8: 6.6})
    for rows in (1, 4) * 5:
        curve.update(rows, 1.0 + 0.02 * rows)
    assert curve(2) < 1.3
    assert curve(8) < 3


def test_smaller_sizes_that_nobody_saw_make_none_dearer_that_was_seen():
    curve = CostCurve({1: 1.0, 2: 1.01, 4: 1.02, 8: 1.04})
    for _ in range(300):
        for rows, seconds in ((4, 2.0), (8, 4.0)):
            curve.update(rows, seconds)
    assert [curve(4), curve(8)] == pytest.approx([2.0, 4.0], rel=0.1)


def test_what_a_size_may_take_at_least_comes_near_what_it_takes_as_it_is_seen():
    curve = CostCurve({1: 1.0, 8: 2.0})
    assert curve.least(8) < 0.3 * curve(8)
    assert 1.0 <= curve.least(8, 1) < 0.8 * curve(8)
    for rows in (1, 8) * 20:
        curve.update(rows, curve(rows))
    assert 0.95 * curve(8) < curve.least(8) < curve.least(8, 1) < curve(8)


def test_a_size_that_took_longer_than_a_larger_one_counts_as_fast_as_that(tmp_path):
    """Else all larger ones would count as slow, and nothing that is drafted would ever correct them."""
    file = CostFile(tmp_path / "costs.json")
    expected = MeasuredCosts(Counting(), file).passes("fast")
    file.write("fast", {rows: each * (3 if rows == 2 else 1) for rows, each in file.read("fast").items()})
    curve = MeasuredCosts(Counting(), file).passes("fast")
    assert [curve(rows) for rows in (4, 6, 8)] == pytest.approx([expected(rows) for rows in (4, 6, 8)])
    assert curve(2) == pytest.approx(expected(4))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"fast": 3}', b'{"fast": {"x": 1}}', b'{"fast": {"1": 0}}', b'{"fast": {"1": 0.1, "2": 0.1}}'],
)
def test_costs_that_cannot_be_read_or_are_of_other_sizes_are_measured_anew(tmp_path, content):
    (tmp_path / "costs.json").write_bytes(content)
    target = Counting()
    MeasuredCosts(target, CostFile(tmp_path / "costs.json")).passes("fast")
    assert set(target.passes) == {1, 2, 4, 6, 8}


def test_modes_are_kept_side_by_side_and_a_file_that_cannot_be_written_costs_time_only(tmp_path):
    file = CostFile(tmp_path / "costs.json")
    file.write("fast", {1: 2.0})
    file.write("reproducible", {6: 3.0})
    assert (file.read("fast"), file.read("reproducible")) == ({1: 2.0}, {6: 3.0})
    CostFile(tmp_path / "costs.json" / "no folder.json").write("fast", {1: 1.0})


def test_a_target_with_a_short_context_can_be_measured_too():
    assert MeasuredCosts(ToyTarget(TABLE, context_limit=48, limits=TreeLimits(15))).passes("fast")(1) > 0


def test_passes_of_a_mode_that_nobody_measured_are_of_no_interest():
    costs = MeasuredCosts(ToyTarget(TABLE))
    costs.update_pass("fast", 4, 100.0)
    assert costs.passes("fast")(4) < 1.0


def test_steps_are_measured_once():
    drafter, costs = ToyDrafter(TABLE), MeasuredCosts(ToyTarget(TABLE))
    assert costs.step_s.measured(drafter) is costs.step_s.measured(drafter)
    assert measure_steps(ToyDrafter(TABLE, context_limit=9))[4] > 0


def test_a_second_start_measures_two_sizes_of_steps_only_and_another_drafter_all(tmp_path, monkeypatch):
    measured, step = [], cost_measurement._step_s
    monkeypatch.setattr(cost_measurement, "_step_s", lambda *args: measured.append(args[-1]) or 0.001 + 0 * step(*args))

    def start(name: str) -> set[int]:
        measured.clear()
        file = CostFile(tmp_path / "costs.json")
        assert MeasuredCosts(ToyTarget(TABLE), file, name).step_s.measured(ToyDrafter(TABLE))(4) > 0
        return set(measured)

    assert [start(name) for name in ("one", "one", "other", "one")] == [{1, 2, 4}, {1, 4}, {1, 2, 4}, {1, 4}]


def test_a_hiccup_of_several_steps_is_not_taken_for_their_cost(monkeypatch):
    """Four steps in a row take 50 ms more, as on a machine that others use too."""
    hiccups, step = [0.05] * 4, cost_measurement._step_s
    monkeypatch.setattr(cost_measurement, "_step_s", lambda *args: step(*args) + (hiccups.pop() if hiccups else 0.0))
    assert measure_steps(ToyDrafter(TABLE))[1] < 0.02
