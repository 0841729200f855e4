"""A text is known by its ids, wherever the engine moved it."""

from dataclasses import dataclass, field

import numpy as np

from omnidraft.decode.external.request_options import NO_OPTIONS, RequestOptions
from omnidraft.decode.external.sequence_tracker import SequenceTracker, TokenBuffer
from tests.unit.decode.external.engines import Clock


@dataclass(eq=False)
class Kept:
    name: str
    tokens: TokenBuffer = field(default_factory=lambda: TokenBuffer(ids([1])))
    options: RequestOptions = NO_OPTIONS


def ids(numbers):
    return np.array(numbers, np.int32)


def kept(name, numbers):
    return Kept(name, TokenBuffer(ids(numbers)))


def follow(**options) -> SequenceTracker:
    return SequenceTracker(**({"keep_s": 10.0, "max_inactive": 5, "clock": Clock()} | options))


def test_a_text_is_found_by_all_of_its_ids():
    tracker, long = follow(), list(range(100))
    first, second = kept("first", long), kept("second", [7, *long[1:]])
    tracker.add(first)
    tracker.add(second)
    assert tracker.find(ids(long), []) is first
    assert tracker.find(ids([7, *long[1:]]), []) is second
    assert tracker.find(ids([8, *long[1:]]), []) is None
    assert tracker.find(ids(long[:-1]), []) is None


def test_a_text_that_went_on_is_found_where_it_is_now():
    tracker, text = follow(), kept("text", [1, 2])
    tracker.add(text)
    for number in range(600):  # beyond the memory it began with
        tracker.append(text, [number, number])
    assert len(text.tokens) == 1202
    assert tracker.find(text.tokens.ids, []) is text
    assert tracker.find(ids([1, 2]), []) is None


def test_two_texts_of_the_same_ids_are_given_once_each():
    tracker, first, second = follow(), kept("first", [1, 2]), kept("second", [1, 2])
    tracker.add(first)
    tracker.add(second)
    found = tracker.find(ids([1, 2]), [])
    assert {found, tracker.find(ids([1, 2]), [found])} == {first, second}
    assert tracker.find(ids([1, 2]), [first, second]) is None


def test_what_was_left_comes_back_until_it_is_forgotten():
    clock = Clock()
    tracker, text = follow(clock=clock), kept("text", [1, 2])
    tracker.add(text)
    assert tracker.set_active([]) == [text]
    clock.now_s = 9.0
    assert tracker.evict() == []
    assert tracker.find(ids([1, 2]), []) is text
    assert tracker.set_active([text]) == []
    assert tracker.set_active([]) == [text]
    clock.now_s = 19.5
    assert tracker.evict() == [text]
    assert tracker.find(ids([1, 2]), []) is None
    assert len(tracker) == 0


def test_of_too_many_the_one_that_was_left_first_goes():
    tracker = follow(max_inactive=2)
    texts = [kept(str(number), [number]) for number in range(4)]
    for text in texts:
        tracker.add(text)
        tracker.set_active([])
    assert [text.name for text in tracker.evict()] == ["0", "1"]
