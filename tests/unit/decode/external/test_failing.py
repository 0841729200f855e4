"""No exception of drafting reaches an engine that is not ours."""

from dataclasses import replace

import numpy as np
import pytest

from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.safe_drafting import DraftingFailures
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.toy_models import ToyDrafter, ToyTable
from tests.unit.decode.external.engines import BatchingEngine, ToyFactory, make_rounds, plain, prompts
from tests.unit.decode.toys import DRAFT_PIECES, TARGET_PIECES, D, make_drafter

pytestmark = pytest.mark.drafting_fails
TABLE = ToyTable.random(len(TARGET_PIECES), seed=7)
FAILURES = "omnidraft_drafting_failures_total"


class Breaking(ToyDrafter):
    """Raises where a text has this id, or in one call of all."""

    def __init__(self, *, poison: int | None = None, call: str = "", at: int = 0) -> None:
        super().__init__(ToyTable.random(len(DRAFT_PIECES), seed=3))
        self._poison, self._call, self._left = poison, call, at

    def prefill_or_extend_all(self, requests):
        self._calls("prefill")
        if any(self._poison in (*session.held[:keep], *ids) for session, keep, ids in requests):
            raise RuntimeError("this text is poison")
        return super().prefill_or_extend_all(requests)

    def branch_all(self, requests):
        self._calls("branch")
        return super().branch_all(requests)

    def _calls(self, name: str) -> None:
        if name == self._call:
            if self._left == 0:
                self._left -= 1
                raise MemoryError("no room for keys")
            self._left -= 1


def rounds_over(model: ToyDrafter, **options):
    proposer = make_drafter()
    *_, drafter = proposer.sources
    assert isinstance(drafter, Drafter)
    proposer.sources = (replace(drafter, model=model),)
    metrics = CountingMetrics()
    rounds, _, tracker = make_rounds(proposer=proposer, failures=DraftingFailures(metrics, "t"), **options)
    return rounds, tracker, metrics


@pytest.mark.parametrize(("call", "at"), [("prefill", 0), ("branch", 0), ("prefill", 5)])
def test_a_failure_costs_one_text_its_drafts_at_most_and_is_drafted_from_afresh(call, at):
    rounds, tracker, metrics = rounds_over(Breaking(call=call, at=at))
    engine = BatchingEngine(rounds, TABLE)
    requests = [engine.ask(prompt, 20) for prompt in prompts(12)]
    engine.run()
    assert all(each.emitted == plain(TABLE, each) for each in requests)
    assert metrics.value(FAILURES, target="t") == 1
    assert engine.num_rows > engine.num_passes * 3  # it went on drafting
    assert sum(text.drafting.session is None for text in tracker) <= 1


def test_a_text_that_kills_every_round_loses_its_drafts_and_the_others_keep_theirs():
    """Euro signs are poison; the texts without go on in common steps in the next round."""
    rounds, tracker, metrics = rounds_over(Breaking(poison=D["\u20ac".encode()]))
    engine = BatchingEngine(rounds, TABLE, max_seqs=8)
    requests = [engine.ask(prompt, 30) for prompt in prompts(8)]
    while engine.waiting or engine.running:
        engine.step()
        poisoned = [text for text in tracker if text.drafting.session is None]
        assert all(not text.tree.tokens[1:] for text in poisoned)
    assert all(each.emitted == plain(TABLE, each) for each in requests)
    assert 0 < metrics.value(FAILURES) <= 2 * len(requests)
    texts = [b"".join(TARGET_PIECES[token] for token in each.ids) for each in requests]
    harmless = [each for each, text in zip(requests, texts, strict=True) if "\u20ac".encode() not in text]
    assert len(harmless) > 1
    assert all(each.num_drafted for each in harmless)


@pytest.mark.parametrize("broken", ["find", "append", "set_active"])
def test_a_round_that_fails_on_the_way_gives_empty_lists_and_the_next_begins_anew(broken, monkeypatch):
    rounds, tracker, metrics = rounds_over(Breaking())
    engine = BatchingEngine(rounds, TABLE)
    requests = [engine.ask(prompt, 40) for prompt in prompts(8)]
    for _ in range(4):
        engine.step()
    whole, calls = getattr(tracker, broken), []

    def breaks(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyError("a bug of ours")
        return whole(*args)

    monkeypatch.setattr(tracker, broken, breaks)
    while len(calls) < 2:
        engine.step()
    assert [each.drafts for each in engine.running] == [[]] * len(engine.running)
    assert len(tracker) == 0
    drafted = 0
    while engine.waiting or engine.running:
        engine.step()
        drafted += sum(bool(each.drafts) for each in engine.running)
    assert drafted > 5
    assert all(each.emitted == plain(TABLE, each) for each in requests)
    assert metrics.value(FAILURES) == 1


def test_a_text_that_cannot_be_opened_has_no_drafts_and_the_others_have():
    class Picky(ToyFactory):
        def open(self, prompt_ids, options):
            if len(prompt_ids) % 2:
                raise RuntimeError("the tokenizer fell over")
            return super().open(prompt_ids, options)

    rounds, _, metrics = rounds_over(Breaking(), factory=Picky())
    engine = BatchingEngine(rounds, TABLE)
    requests = [engine.ask(prompt, 12) for prompt in prompts(10)]
    engine.run()
    assert all(each.emitted == plain(TABLE, each) for each in requests)
    assert metrics.value(FAILURES) > 0
    assert engine.num_rows > engine.num_passes


def test_the_thread_that_ticks_survives(monkeypatch):
    rounds, tracker, metrics = rounds_over(Breaking())
    rounds.next([[3]], lambda place: np.array([2, 3], np.int32), lambda rows: None)
    monkeypatch.setattr(tracker, "evict", lambda: 1 / 0)
    rounds.tick()
    assert metrics.value(FAILURES) == 1
    assert len(tracker) == 0
