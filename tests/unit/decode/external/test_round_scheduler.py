"""Rounds over an engine that moves rows, preempts and aborts without notice."""

import gc
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from omnidraft.decode.drafting.session_pool import DrafterMemory
from omnidraft.decode.external.sequence_tracker import ExternalSequence
from omnidraft.decode.logprobs import top_k_logprobs
from omnidraft.decode.policy.chain import ThresholdPolicy
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve, guessed_passes
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.toy_models import ToyTable
from omnidraft.traces import codec
from tests.unit.decode.external.engines import BatchingEngine, Clock, ToyFactory, make_rounds, plain, prompts
from tests.unit.decode.toys import TARGET_PIECES, make_drafter

TABLE = ToyTable.random(len(TARGET_PIECES), seed=7)


@pytest.mark.parametrize("trouble", [0.0, 0.1])
def test_every_text_is_drafted_for_whatever_happens_to_the_others(trouble):
    rounds, _, _ = make_rounds()
    engine = BatchingEngine(rounds, TABLE, trouble=trouble)
    requests = [engine.ask(prompt, 20) for prompt in prompts(40)]
    engine.run()
    assert all(each.emitted == plain(TABLE, each)[: len(each.emitted)] for each in requests)
    assert engine.num_rows > 2 * engine.num_passes
    assert all(each.num_drafted for each in requests if len(each.emitted) > 8)


def test_a_text_goes_on_where_it_was_after_preemption_in_any_row():
    """Without aborts every request is opened once, however often it was preempted."""
    factory = ToyFactory()
    rounds, _, tracker = make_rounds(factory=factory)
    engine = BatchingEngine(rounds, TABLE, trouble=0.0, max_seqs=6)
    requests = [engine.ask([*prompt, *[3] * number], 20) for number, prompt in enumerate(prompts(30))]
    for turn in range(1000):
        engine.step()
        if turn % 7 == 0:
            for each in engine.running[: 1 + turn % 5]:
                each.away, each.drafts = 2, []
    assert not engine.running
    assert not engine.waiting
    assert factory.num_opened == len(requests)
    assert len(tracker) <= len(requests)


@pytest.mark.long
def test_two_thousand_requests_leave_nothing_behind():
    """Ended, aborted and preempted ones, short and long; memory is bounded while they come and free afterwards."""
    clock = Clock()
    rounds, _, tracker = make_rounds(clock=clock, keep_left_s=50.0, max_inactive=20, policy=ThresholdPolicy(0.3))
    engine = BatchingEngine(rounds, TABLE, clock=clock, trouble=0.02, max_seqs=8)
    most = 0
    for batch in range(20):
        for number, prompt in enumerate(prompts(100, seed=batch)):
            engine.ask(prompt, 1 + number % 7)
        engine.run()
        most = max(most, len(tracker))
    assert most <= 20 + 8
    for _ in range(2):  # what was worked on last is left, then forgotten
        clock.now_s += 100.0
        rounds.tick()
    assert len(tracker) == 0
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, ExternalSequence)]


def test_an_idle_engine_holds_nothing_after_a_while():
    clock = Clock()
    factory = ToyFactory(is_traced=True)
    rounds, _, tracker = make_rounds(clock=clock, factory=factory)
    engine = BatchingEngine(rounds, TABLE, clock=clock)
    engine.ask(prompts(1)[0], 5)
    engine.run()
    num_written = len(factory.records)
    clock.now_s += 6.0
    rounds.tick()
    assert len(factory.records) == num_written + 1
    clock.now_s += 100.0
    rounds.tick()
    assert len(tracker) == 0


def test_an_order_to_forget_frees_what_texts_left_and_those_that_run_leave_nothing():
    clock = Clock()
    memory = DrafterMemory(100_000)
    rounds, _, _ = make_rounds(clock=clock, memory=memory)
    engine = BatchingEngine(rounds, TABLE, clock=clock)

    def idle_ids() -> int:
        clock.now_s += 6.0
        rounds.tick()
        return memory.num_ids

    engine.ask(prompts(1)[0], 5)
    engine.run()
    assert idle_ids() > 0
    rounds.forget_texts()
    assert idle_ids() == 0
    engine.ask(prompts(1)[0], 30)
    for _ in range(3):
        engine.step()
    rounds.forget_texts()
    engine.run()
    assert memory.num_forgotten == 2
    assert idle_ids() == 0


def test_every_emitted_token_is_recorded_once():
    """Also of texts that were preempted or whose clients went away."""
    factory = ToyFactory(is_traced=True)
    rounds, _, _ = make_rounds(factory=factory)
    engine = BatchingEngine(rounds, TABLE, trouble=0.05)
    requests = [engine.ask([*prompt, *[4] * number], 20) for number, prompt in enumerate(prompts(30))]
    engine.run()
    rounds.close()
    said = defaultdict(list)
    for record in sorted(factory.records, key=lambda record: record.segment):
        said[record.request_id] += record.emitted_ids.tolist()
        codec.encode(record)
    assert sorted(said.values()) == sorted(each.emitted for each in requests if each.emitted)


def test_records_say_what_the_target_believed():
    factory = ToyFactory(is_traced=True)
    rounds, _, _ = make_rounds(factory=factory)
    engine = BatchingEngine(rounds, TABLE, max_seqs=3)
    for number, prompt in enumerate(prompts(6)):
        engine.ask([*prompt, *[5] * number], 12)
    engine.run()
    rounds.close()
    with_beliefs = [record for record in factory.records if record.beliefs is not None]
    assert with_beliefs
    for record in with_beliefs:
        text = [*record.prompt_ids.tolist(), *record.before_ids.tolist()]
        emitted = record.emitted_ids.tolist()
        logits = np.stack([TABLE.logits([*text, *emitted[:end]]).numpy() for end in range(len(emitted))])
        wanted = top_k_logprobs(torch.tensor(logits), range(len(emitted)), emitted, 4)
        np.testing.assert_array_equal(record.beliefs.top_ids_EK, wanted.top_ids_EK)
        np.testing.assert_array_equal(record.beliefs.emitted_log_p_E, wanted.emitted_log_p_E)


def test_a_text_keeps_its_snapshot_and_the_next_takes_the_new_one():
    rounds, slot, tracker = make_rounds()
    engine = BatchingEngine(rounds, TABLE, max_seqs=2)
    engine.ask(prompts(1)[0], 30)
    engine.step()
    engine.step()
    slot.swap(replace(slot.current, version=2, snapshot_id="two", proposer=make_drafter()))
    engine.ask([*prompts(1)[0], 3], 30)
    for _ in range(3):
        engine.step()
    versions = {len(text.drafting.session.request.prompt_ids): text.snapshot.version for text in tracker}
    assert sorted(versions.items()) == [(len(prompts(1)[0]), None), (len(prompts(1)[0]) + 1, 2)]


@pytest.mark.parametrize(
    ("pass_s", "is_worth_it"),
    [(lambda rows: 1 + 0.01 * rows, True), (lambda rows: rows, False)],
    ids=["flat", "linear"],
)
def test_drafts_are_as_many_as_pay(pass_s, is_worth_it):
    """Texts that soon repeat themselves, where rows cost nearly nothing or all: it knows neither before."""
    clock, passes, metrics = Clock(), guessed_passes(), CountingMetrics()
    policy = CostPolicy(passes, CostCurve({1: 0.01}), num_candidates=1)
    rounds, _, _ = make_rounds(policy=policy, update_pass=passes.update, clock=clock, metrics=metrics)
    engine = BatchingEngine(rounds, TABLE, clock=clock, pass_s=pass_s, max_seqs=1)
    for prompt in prompts(30):
        engine.ask(prompt, 40)
    engine.run()
    passed = engine.num_passes
    started, rows = clock.now_s, engine.num_rows
    requests = [engine.ask(prompt, 40) for prompt in prompts(30, seed=1)]
    engine.run()
    num_drafted = engine.num_rows - rows - (engine.num_passes - passed)
    num_emitted = sum(len(each.emitted) for each in requests)
    plain_s = num_emitted * pass_s(1)
    assert (clock.now_s - started) < plain_s * (0.9 if is_worth_it else 1.06)
    assert (num_drafted > 0.5 * (engine.num_passes - passed)) == is_worth_it


def test_texts_beyond_the_drafters_memory_are_decoded_all_the_same():
    """Memory is given to texts as they begin; what they grow by comes on top."""
    most = {}
    for drafter_ids in (40, 100_000):
        memory = DrafterMemory(drafter_ids)
        rounds, _, _ = make_rounds(memory=memory)
        engine = BatchingEngine(rounds, TABLE, max_seqs=8)
        requests = [engine.ask([*prompt, *[3] * (number % 4)], 12) for number, prompt in enumerate(prompts(20))]
        held = []
        while engine.running or engine.waiting:
            engine.step()
            held.append(memory.num_ids)
        assert all(each.emitted == plain(TABLE, each) for each in requests)
        most[drafter_ids] = max(held)
    assert most[40] < 0.5 * most[100_000]
