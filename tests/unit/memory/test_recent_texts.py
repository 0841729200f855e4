"""Recent texts stay bounded, leave scope by scope, and are found in their own scope only."""

from hypothesis import given
from hypothesis import strategies as st

from omnidraft.memory.recent_texts import RecentTexts

TEXTS = st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 9), max_size=30)), max_size=40)


def finds(memory: RecentTexts, scope: str, context: list[int]) -> bool:
    return any(index.longest_match(context) for index in memory.of(scope))


@given(TEXTS, st.integers(0, 200))
def test_it_knows_how_much_it_holds_and_never_holds_more_than_it_may(
    texts: list[tuple[str, list[int]]], max_ids: int
) -> None:
    memory = RecentTexts(max_ids)
    for scope, text in texts:
        memory.add(scope, text)
        held = sum(len(index) for scope in "abcd" for index in memory.of(scope))
        assert memory.num_ids == held <= max_ids


def test_the_least_recently_used_scope_leaves_first() -> None:
    memory = RecentTexts(64)
    for number, scope in enumerate("abcdefgh"):
        memory.add(scope, [number, 50, 51])
    assert finds(memory, "a", [0, 50])
    for scope in "ijklmnopq":
        memory.add(scope, [9, 9, 9])
    assert finds(memory, "a", [0, 50])
    assert not finds(memory, "b", [1, 50])


def test_the_newest_texts_of_a_scope_stay() -> None:
    memory = RecentTexts(8 * 40)
    for number in range(30):
        memory.add("a", [number, number, 77, 78])
    assert finds(memory, "a", [29, 29, 77])
    assert not finds(memory, "a", [0, 0])


def test_a_text_is_found_in_its_own_scope_until_all_is_forgotten() -> None:
    memory = RecentTexts(1000)
    memory.add("a", [1, 2, 3])
    assert finds(memory, "a", [1, 2])
    assert not finds(memory, "b", [1, 2])
    memory.clear()
    assert not finds(memory, "a", [1, 2])
    assert memory.num_ids == 0


def test_of_a_text_that_is_too_long_its_end_is_remembered() -> None:
    memory = RecentTexts(8 * 2 * 10)
    memory.add("a", list(range(100)))
    assert finds(memory, "a", [96, 97])
    assert not finds(memory, "a", [10, 11])


def test_a_scope_for_every_text_takes_no_more_memory_than_a_few_long_ones() -> None:
    memory = RecentTexts(256 * 100)
    for number in range(1000):
        memory.add(number, [number, 1, 2, 3])
    assert [scope for scope in range(1000) if memory.of(scope)] == list(range(900, 1000))
