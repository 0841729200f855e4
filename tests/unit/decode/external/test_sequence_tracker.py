"""A text is known by its ids, wherever the engine moved it."""

from dataclasses import dataclass, field

import numpy as np

from omnidraft.decode.external.sequence_tracker import SequenceTracker, TokenBuffer
from tests.unit.decode.external.engines import Clock


@dataclass(eq=False)
class Kept:
    name: str
    tokens: TokenBuffer = field(default_factory=lambda: TokenBuffer(ids([1])))


def ids(numbers):
    return np.array(numbers, np.int32)


def kept(name, numbers):
    return Kept(name, TokenBuffer(ids(numbers)))


def follow(**options) -> SequenceTracker[Kept]:
    return SequenceTracker(**({"keep_s": 10.0, "max_inactive": 5, "clock": Clock()} | options))


def test_a_text_is_found_by_all_of_its_ids():
    followed, long = follow(), list(range(100))
    first, second = kept("first", long), kept("second", [7, *long[1:]])
    followed.add(first)
    followed.add(second)
    assert followed.find(ids(long), []) is first
    assert followed.find(ids([7, *long[1:]]), []) is second
    assert followed.find(ids([8, *long[1:]]), []) is None
    assert followed.find(ids(long[:-1]), []) is None


def test_a_text_that_went_on_is_found_where_it_is_now():
    followed, text = follow(), kept("text", [1, 2])
    followed.add(text)
    for number in range(600):  # beyond the memory it began with
        followed.append(text, [number, number])
    assert len(text.tokens) == 1202
    assert followed.find(text.tokens.ids, []) is text
    assert followed.find(ids([1, 2]), []) is None


def test_two_texts_of_the_same_ids_are_given_once_each():
    followed, first, second = follow(), kept("first", [1, 2]), kept("second", [1, 2])
    followed.add(first)
    followed.add(second)
    found = followed.find(ids([1, 2]), [])
    assert {found, followed.find(ids([1, 2]), [found])} == {first, second}
    assert followed.find(ids([1, 2]), [first, second]) is None


def test_what_was_left_comes_back_until_it_is_forgotten():
    clock = Clock()
    followed, text = follow(clock=clock), kept("text", [1, 2])
    followed.add(text)
    assert followed.set_active([]) == [text]
    clock.now_s = 9.0
    assert followed.evict() == []
    assert followed.find(ids([1, 2]), []) is text
    assert followed.set_active([text]) == []
    assert followed.set_active([]) == [text]
    clock.now_s = 19.5
    assert followed.evict() == [text]
    assert followed.find(ids([1, 2]), []) is None
    assert len(followed) == 0


def test_of_too_many_the_one_that_was_left_first_goes():
    followed = follow(max_inactive=2)
    texts = [kept(str(number), [number]) for number in range(4)]
    for text in texts:
        followed.add(text)
        followed.set_active([])
    assert [text.name for text in followed.evict()] == ["0", "1"]
