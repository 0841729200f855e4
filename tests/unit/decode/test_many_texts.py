"""Many texts in one target: each is the text that it is alone, whatever is beside it, reused, chunked or preempted."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.config import SchedulerSettings
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.policy.cost_model import CostCurve, MeasuredCosts
from omnidraft.decode.prefix_cache import PrefixCache
from omnidraft.decode.sequence import SequenceState
from omnidraft.decode.teacher_forcing import score_prompt
from omnidraft.errors import ContextExceeded, ContractError
from omnidraft.ports import Mode, Request, Sampling, TreeLimits
from omnidraft.testing.toy_models import ToyTarget
from tests.unit.decode.toys import (
    PROMPT,
    PROPOSERS,
    TABLE,
    TARGET_TOKENIZER,
    RandomTrees,
    emitted,
    make_request,
    slow_decode,
)


def decoder(**scheduling: object) -> Decoder:
    return Decoder(
        ToyTarget(TABLE), TARGET_TOKENIZER.vocabulary, trace_top_k=4, scheduling=SchedulerSettings(**scheduling)
    )


def finish(decoder: Decoder) -> dict[SequenceState, list[int]]:
    """Run rounds until nothing is left; return what each sequence emitted in them."""
    texts: dict[SequenceState, list[int]] = {}
    for _ in range(2000):
        for output in decoder.step():
            if output.error is not None:
                raise output.error
            texts.setdefault(output.sequence, []).extend(output.step.emitted)
        if not decoder.scheduler.sequences:
            return texts
    raise AssertionError("the texts do not end")


def requests(num: int, **fields: object) -> list[Request]:
    prompts = [PROMPT * (1 + number % 3) + PROMPT[: number % 5] for number in range(num)]
    return [
        replace(make_request(Sampling(0.0 if number % 3 == 0 else 1.0), seed=number, **fields), prompt_ids=prompt)
        for number, prompt in enumerate(prompts)
    ]


def ask(together: Decoder, times: int = 1, *, client: str = "", scope: str | None = None, **fields) -> SequenceState:
    """Add a text without drafts, whose prompt is the usual one so many times."""
    request = replace(make_request(**fields), prompt_ids=PROMPT * times)
    return together.add(request, None, client=client, cache_scope=scope)


@pytest.mark.parametrize("name", PROPOSERS)
def test_eight_texts_together_are_the_texts_that_they_are_alone(name):
    together = decoder()
    wanted = {together.add(each, PROPOSERS[name]): slow_decode(TABLE, each) for each in requests(8)}
    assert finish(together) == wanted


@settings(max_examples=40)
@given(data=st.data(), num=st.integers(1, 7), max_num_seqs=st.integers(1, 4), memory=st.integers(60, 400))
def test_arrival_preemption_abort_chunks_and_reuse_change_no_text(data, num, max_num_seqs, memory):
    together = decoder(max_num_seqs=max_num_seqs, kv_cache_gib=memory / 2**30)
    waiting = deque(requests(num, max_new_tokens=data.draw(st.integers(1, 20))))
    texts: dict[SequenceState, list[int]] = {}
    aborted = []
    for _ in range(600):
        if waiting and data.draw(st.booleans()):
            scope = data.draw(st.sampled_from([None, "a", "b"]))
            client = data.draw(st.sampled_from(["x", "y"]))
            sequence = together.add(
                waiting.popleft(), RandomTrees(data.draw(st.integers(0, 99))), client=client, cache_scope=scope
            )
            texts[sequence] = []
        running = [each for each in together.scheduler.sequences if each.session is not None]
        if running and data.draw(st.integers(0, 3)) == 0:
            together.scheduler.preempt(data.draw(st.sampled_from(running)))
        if running and data.draw(st.integers(0, 30)) == 0:
            aborted.append(data.draw(st.sampled_from(together.scheduler.sequences)))
            together.abort(aborted[-1], keeps_keys=data.draw(st.booleans()))
        for output in together.step():
            assert output.error is None
            texts[output.sequence] += output.step.emitted
        if not waiting and not together.scheduler.sequences:
            break
    else:
        texts |= finish_with(together, texts)
    for sequence, text in texts.items():
        alone = slow_decode(TABLE, sequence.request)
        assert text == (alone[: len(text)] if sequence in aborted else alone)


def finish_with(together: Decoder, texts: dict[SequenceState, list[int]]) -> dict[SequenceState, list[int]]:
    return {sequence: texts[sequence] + more for sequence, more in finish(together).items()}


def test_a_prompt_is_read_in_chunks_beside_running_texts():
    together = decoder()
    running = ask(together, max_new_tokens=40, num_draft_tokens=0)
    together.step()
    long = ask(together, 20)
    sizes, emitted_meanwhile = [], 0
    while long.session is None or long.num_unread:
        before = 0 if long.session is None else long.session.num_kept
        emitted_meanwhile += sum(len(each.step.emitted) for each in together.step() if each.sequence is running)
        sizes.append(long.session.num_kept - before)
    assert max(sizes) <= 16
    assert emitted_meanwhile == len(sizes) > 5


class Curve(MeasuredCosts):
    """Known from the start, whatever passes take here."""

    def __init__(self, seconds_by_rows: dict[int, float]) -> None:
        self.curve = CostCurve(seconds_by_rows)

    def measured(self, mode):
        return self.curve

    def update_pass(self, mode, rows, seconds):
        """The curve stays."""


@pytest.mark.parametrize(
    ("seconds_by_rows", "beside"),
    [({1: 0.1, 5: 0.3, 65: 3.3}, 4), ({1: 0.4, 64: 0.8}, 1), ({64: 0.8}, 65), (None, 16)],
    ids=["slow", "too slow for one", "padded", "unmeasured"],
)
def test_a_prompt_is_scored_in_passes_that_running_texts_may_wait_for(seconds_by_rows, beside):
    costs = None if seconds_by_rows is None else Curve(seconds_by_rows)
    scoring = Decoder(ToyTarget(TABLE), TARGET_TOKENIZER.vocabulary, costs=costs)
    request = replace(make_request(num_draft_tokens=0), prompt_ids=PROMPT * 60)
    num_scored = len(request.prompt_ids) - 1
    alone = [len(each) for each in score_prompt(scoring, request, 0)]
    assert alone == [65, 65, 65, 65, num_scored - 4 * 65]
    scoring.add(make_request(num_draft_tokens=0), None)
    waiting = score_prompt(scoring, request, 0)
    sizes = [len(next(waiting))]  # nothing runs yet
    scoring.step()
    scoring.step()
    sizes += [len(next(waiting)) for _ in range(2)]
    assert sizes == [65, beside, beside]
    finish(scoring)
    assert len(next(waiting)) == 65
    assert sum(map(len, waiting)) == num_scored - 2 * (65 + beside)


def test_the_keys_of_a_prompt_that_is_scored_count_as_memory():
    together = decoder(kv_cache_gib=440 / 2**30)
    ask(together, 2, scope="me")
    finish(together)
    texts = [together.add(each, None) for each in requests(3, max_new_tokens=60)]
    together.step()
    assert all(each.session is not None for each in texts)
    scoring = score_prompt(together, replace(make_request(), prompt_ids=PROMPT * 50), 0)
    next(scoring)
    assert [each.session is None for each in texts] == [False, False, True]
    assert len(together.scheduler.prefixes) == 0
    together.step()
    assert texts[2].session is None
    scoring.close()
    together.step()
    assert texts[2].session is not None
    assert finish(together)
    assert together.scheduler.num_preemptions == 1


def test_one_text_goes_on_beside_a_prompt_that_fills_the_memory():
    together = decoder(kv_cache_gib=200 / 2**30)
    texts = [together.add(each, None) for each in requests(2)]
    for _ in score_prompt(together, replace(make_request(), prompt_ids=PROMPT * 60), 0):
        together.step()
    assert texts[0].is_finished or len(texts[0].ids) > len(texts[0].request.prompt_ids)
    finish(together)
    assert all(each.is_finished for each in texts)


def test_keys_are_reused_within_a_scope_only():
    together = decoder()
    first = ask(together, scope="tenant a")
    finish(together)
    again = replace(make_request(seed=9), prompt_ids=(*first.ids, *PROMPT))
    mine = together.add(again, None, cache_scope="tenant a")
    others = together.add(again, None, cache_scope="tenant b")
    nobodys = together.add(again, None)
    assert finish(together)[mine] == slow_decode(TABLE, again)
    assert mine.num_reused == len(first.ids) - 1
    assert others.num_reused == nobodys.num_reused == 0


def test_choices_wait_for_the_prompt_that_one_of_them_reads():
    together = decoder()
    choices = [ask(together, 20, scope="me", seed=seed) for seed in range(4)]
    texts = finish(together)
    assert [each.num_reused for each in choices] == [0] + 3 * [20 * len(PROMPT) - 1]
    assert all(texts[each] == slow_decode(TABLE, each.request) for each in choices)


class CountingPrefixes(PrefixCache):
    """Counts the comparisons of prompts."""

    num_compared = 0

    def num_shared(self, source_scope, source, scope, ids):
        self.num_compared += 1
        return super().num_shared(source_scope, source, scope, ids)


class CountingClient(str):
    """Counts how often it is looked up."""

    num_hashed = 0

    def __hash__(self):
        type(self).num_hashed += 1
        return super().__hash__()


def test_a_round_looks_at_each_of_2000_texts_that_wait_for_a_prefix_a_few_times_only():
    together, client = decoder(), CountingClient("client")
    together.scheduler.prefixes = prefixes = CountingPrefixes()
    for _ in range(2000):
        ask(together, 40, client=client, scope="me")
    for _ in range(2):
        prefixes.num_compared = CountingClient.num_hashed = 0
        together.scheduler.schedule(lambda mode: None)
        assert together.scheduler.num_admitted == 1
        assert prefixes.num_compared < 2000
        assert CountingClient.num_hashed < 20_000


def test_clients_are_admitted_in_turn_and_each_ones_texts_in_their_order():
    together = decoder(max_num_seqs=4)
    texts = [together.add(each, None, client=client) for each, client in zip(requests(6), "aaabbc", strict=True)]
    together.scheduler.schedule(lambda mode: None)
    assert [texts.index(each) for each in together.scheduler.sequences] == [0, 3, 5, 1, 2, 4]


def test_a_client_with_many_texts_makes_way_for_another():
    together = decoder(max_num_seqs=4)
    many = [together.add(each, None, client="many") for each in requests(6, max_new_tokens=20)]
    together.step()
    assert together.scheduler.has_room("other")
    other = ask(together, client="other", max_new_tokens=5)
    together.step()
    assert other.session is not None
    texts = finish(together)
    for each in many[:2]:
        assert slow_decode(TABLE, each.request)[-len(texts[each]) :] == texts[each]


def test_there_is_no_room_for_a_text_where_a_waiting_or_a_promised_one_takes_the_place():
    together = decoder(max_num_seqs=2)
    scheduler = together.scheduler
    for each in requests(2, max_new_tokens=20):
        together.add(each, None, client="many")
    together.step()
    assert scheduler.has_room("a")
    assert not scheduler.has_room("b", reserved=["a"])
    ask(together, client="a", max_new_tokens=20)
    assert not any(map(scheduler.has_room, ("a", "b", "many")))
    together.step()
    assert scheduler.num_preemptions == 1
    assert not any(map(scheduler.has_room, ("a", "b", "many")))  # many's second text waits, so it makes no way
    finish(together)
    assert scheduler.has_room("b")


class Copying(ToyTarget):
    """Remembers how many keys each text took over."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.num_copied: list[int] = []

    def reuse(self, session, source, num_ids):
        self.num_copied.append(super().reuse(session, source, num_ids))
        return self.num_copied[-1]


def test_keys_are_sought_among_texts_that_are_rotated_alike():
    target = Copying()
    target.first_context = len(PROMPT) + 10
    together = Decoder(target, TARGET_TOKENIZER.vocabulary)
    for max_new_tokens in (10, 11, 11, 10):
        ask(together, scope="a", max_new_tokens=max_new_tokens)
        finish(together)
    assert target.num_copied == [len(PROMPT) - 1] * 2


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_a_text_that_makes_way_where_memory_is_free_reads_its_prompt_once(mode):
    target = Copying()
    together = Decoder(target, TARGET_TOKENIZER.vocabulary, scheduling=SchedulerSettings(max_num_seqs=2))
    asked = requests(2, max_new_tokens=20, mode=mode)
    texts: dict[SequenceState, list[int]] = {
        together.add(each, None, client="many", cache_scope="many"): [] for each in asked
    }
    for round_number in range(200):
        if round_number == 6:
            ask(together, client="other", max_new_tokens=3)
        for output in together.step():
            texts.setdefault(output.sequence, []).extend(output.step.emitted)
    assert together.scheduler.num_preemptions == 1
    assert target.num_copied[-1] == len(asked[1].prompt_ids) - 1
    assert all(text == slow_decode(TABLE, each.request) for each, text in texts.items())
    assert len(texts) == 3


def test_a_text_that_the_target_refuses_ends_alone():
    together = decoder()
    good, bad = ask(together), ask(together, max_new_tokens=9999)
    outputs = together.step() + together.step()
    assert [type(each.error) for each in outputs if each.sequence is bad] == [ContextExceeded]
    assert emitted([each.step for each in outputs if each.sequence is good]) == slow_decode(TABLE, good.request)[:1]


class Padded(ToyTarget):
    """The passes of the modes differ."""

    def limits(self, mode: Mode) -> TreeLimits:
        return TreeLimits(7) if mode == "reproducible" else super().limits(mode)


def costs_around(target: ToyTarget, modes: Sequence[Mode]) -> tuple[list[float], list[float]]:
    """What a row costs in either mode, before and after texts of these modes were decoded together."""
    costs = MeasuredCosts(target)
    curves = [costs.passes("fast"), costs.passes("reproducible")]
    together = Decoder(target, TARGET_TOKENIZER.vocabulary, costs=costs)
    before = [curve(1) for curve in curves]
    for mode in modes:
        ask(together, mode=mode, num_draft_tokens=0)
    finish(together)
    return before, [curve(1) for curve in curves]


def test_a_pass_over_texts_of_both_modes_is_on_no_cost_curve() -> None:
    before, after = costs_around(Padded(TABLE), ["fast", "reproducible"])
    assert after == before
    before, after = costs_around(Padded(TABLE), ["fast", "fast"])
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_where_some_prompt_is_always_read_one_round_in_33_reads_none_and_is_measured() -> None:
    target = ToyTarget(TABLE)
    costs = MeasuredCosts(target)
    costs.passes("fast")
    measured: list[int] = []
    costs.update_pass = lambda mode, rows, seconds: measured.append(rows)  # type: ignore[method-assign]
    together, texts = Decoder(target, TARGET_TOKENIZER.vocabulary, costs=costs), []
    for seed in range(100):
        texts.append(ask(together, num_draft_tokens=0, max_new_tokens=3, seed=seed))
        together.step()
    assert len(measured) == 3
    finish(together)
    for text in texts:
        assert text.ids[len(PROMPT) :] == slow_decode(TABLE, text.request)


def test_passes_over_each_text_alone_after_one_that_failed_are_on_no_cost_curve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = ToyTarget.forward

    def only_one(target, trees, prompts=()):
        if len(trees) + len(prompts) > 1:
            raise ContractError("the keys of one text, not those of several")
        return forward(target, trees, prompts)

    monkeypatch.setattr(ToyTarget, "forward", only_one)
    before, after = costs_around(Padded(TABLE), ["fast", "fast"])
    assert after == before


class Activations:
    """What a pass holds in memory."""


class OutOfSpace(RuntimeError):
    """A target's error whose message is another one each time."""


def test_what_a_failed_pass_held_is_free_before_its_texts_are_computed_alone_and_its_error_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    together, forward = decoder(), ToyTarget.forward
    held: list[ref[Activations]] = []
    num_held_alone = []

    def only_one(target, trees, prompts=()):
        if len(trees) + len(prompts) > 1:
            activations = Activations()
            held.append(ref(activations))
            raise OutOfSpace(f"tried to allocate {len(held)} GiB")
        num_held_alone.append(sum(each() is not None for each in held))
        return forward(target, trees, prompts)

    monkeypatch.setattr(ToyTarget, "forward", only_one)
    texts = [together.add(each, None) for each in requests(3)]
    found = finish(together)
    assert [found[each] for each in texts] == [slow_decode(TABLE, each.request) for each in texts]
    assert len(held) > 1
    assert set(num_held_alone) == {0}
    assert caplog.text.count("cannot compute several in a pass") == 1
    assert "OutOfSpace: tried to allocate 1 GiB" in caplog.text


def test_a_text_that_waits_for_memory_leaves_the_keys_of_ended_ones_alone_that_would_not_be_enough():
    together = decoder(kv_cache_gib=300 / 2**30)
    ask(together, 2, scope="me")
    finish(together)
    ask(together, 14, max_new_tokens=40)
    together.step()
    waiting = ask(together, 30)
    for _ in range(5):
        together.step()
    assert waiting.session is None
    assert len(together.scheduler.prefixes) == 1
    finish(together)
    assert waiting.is_finished


def test_nobody_makes_way_for_a_text_that_waits_for_a_prompt_which_is_being_read():
    together = decoder(max_num_seqs=3)
    running = [ask(together, 60, client="many", scope="us", max_new_tokens=60)]
    running += [ask(together, client="many", max_new_tokens=60, seed=seed) for seed in range(2)]
    together.step()
    other = ask(together, 60, client="other", scope="us")
    while running[0].num_unread:
        together.step()
        assert together.scheduler.num_preemptions == 0
    finish(together)
    assert other.num_reused == 60 * len(PROMPT) - 1


def test_a_short_prompt_is_not_read_behind_the_long_ones_of_another_client():
    together = decoder(max_num_seqs=8)
    many = [ask(together, 100, client="many", seed=seed) for seed in range(4)]
    other = ask(together, client="other", max_new_tokens=3)
    for _ in range(4):
        together.step()
    assert other.is_finished
    assert all(each.num_unread for each in many)
    finish(together)


def test_a_client_with_many_texts_makes_way_for_another_that_waits_for_memory():
    together = decoder(max_num_seqs=8, kv_cache_gib=500 / 2**30)
    many = [together.add(each, None, client="many") for each in requests(7, max_new_tokens=40)]
    for _ in range(8):
        together.step()
    assert sum(each.session is not None for each in many) >= 3
    other = ask(together, 8, client="other", max_new_tokens=3)
    for _ in range(8):
        together.step()
    assert other.is_finished
    assert together.scheduler.num_preemptions >= 1
    assert not any(each.is_finished for each in many)
    finish(together)


def test_nobody_makes_way_where_that_is_not_enough():
    together = decoder(max_num_seqs=8, kv_cache_gib=300 / 2**30)
    many = [together.add(each, None, client="many") for each in requests(4, max_new_tokens=30)]
    together.step()
    ask(together, 45, client="other")  # fits alone
    for _ in range(5):
        together.step()
    assert together.scheduler.num_preemptions == 0
    finish(together)
    assert all(each.is_finished for each in many)
