"""Prefixes whose keys are kept: who finds them, what a search looks at, and which makes way first."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from omnidraft.decode import prefix_cache
from omnidraft.decode.common_prefix import common_prefix
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.prefix_cache import PrefixCache
from omnidraft.testing.toy_models import ToyTarget
from tests.unit.decode.toys import PROMPT, TABLE, TARGET_TOKENIZER, make_request

LONG = PROMPT * 3


def cached(*texts: tuple[str, Sequence[int]]) -> PrefixCache:
    """Return the prefixes that ended texts of these scopes and ids leave behind."""
    decoder = Decoder(ToyTarget(TABLE), TARGET_TOKENIZER.vocabulary)
    for scope, ids in texts:
        request = replace(make_request(max_new_tokens=1), prompt_ids=tuple(ids))
        decoder.add(request, None, cache_scope=scope)
        while decoder.scheduler.sequences:
            decoder.step()
    return decoder.scheduler.prefixes


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """The ids with which others are compared."""
    seen: list[Sequence[int]] = []

    def comparing(left: Sequence[int], right: Sequence[int]) -> int:
        seen.append(left)
        return common_prefix(left, right)

    monkeypatch.setattr(prefix_cache, "common_prefix", comparing)
    return seen


def test_a_search_compares_with_prefixes_of_its_own_scope_only(compared: list[Sequence[int]]) -> None:
    others = [(f"user {number}", (*LONG, number)) for number in range(20)]
    prefixes = cached(("me", PROMPT), *others, ("me", PROMPT[1:]))
    compared.clear()
    found = prefixes.find("me", LONG)
    assert found is not None
    assert found[1] == len(PROMPT)
    assert sorted(map(tuple, compared)) == sorted(map(tuple, [PROMPT, PROMPT[1:]]))


def test_a_text_takes_no_keys_of_another_scope(compared: list[Sequence[int]]) -> None:
    assert PrefixCache().num_shared("other", LONG, "me", LONG) == 0
    assert not compared
    assert PrefixCache().num_shared("me", LONG, "me", LONG) == len(LONG)


def test_the_prefix_that_was_found_last_makes_way_last() -> None:
    prefixes = cached(*((scope, PROMPT) for scope in "abcd"))
    sizes = prefixes.kv_bytes / 4
    for scope in "ac":
        assert prefixes.find(scope, PROMPT)
    for num_left, scope in ((3, "b"), (2, "d"), (1, "a"), (0, "c")):
        prefixes.evict()
        assert (len(prefixes), prefixes.kv_bytes) == (num_left, num_left * sizes)
        assert not prefixes.find(scope, PROMPT)


def test_of_prefixes_with_equally_many_ids_the_one_is_found_that_was_used_first() -> None:
    prefixes = cached(("me", (*PROMPT, 1)), ("me", (*PROMPT, 2)))
    # The second text found the first when it began, and was left behind after that.
    found = [prefixes.find("me", PROMPT) for _ in range(3)]
    assert [each and each[0].ids[len(PROMPT)] for each in found] == [1, 2, 1]


def test_a_prefix_takes_the_place_of_one_that_it_continues_with_its_memory() -> None:
    alone = cached(("me", PROMPT * 2)).kv_bytes
    prefixes = cached(("me", PROMPT), ("other", PROMPT), ("me", PROMPT * 2))
    assert len(prefixes) == 2
    prefixes.evict()
    assert prefixes.kv_bytes == alone
    prefixes.clear()
    assert (len(prefixes), prefixes.kv_bytes) == (0, 0)


@pytest.mark.parametrize("keeps_keys", [True, False])
def test_what_an_aborted_text_read_is_found_by_the_next_one(keeps_keys: bool) -> None:
    decoder = Decoder(ToyTarget(TABLE), TARGET_TOKENIZER.vocabulary)
    request = replace(make_request(max_new_tokens=5), prompt_ids=LONG)
    decoder.add(request, None, cache_scope="me")
    decoder.step()
    decoder.abort(decoder.scheduler.sequences[0], keeps_keys=keeps_keys)
    found = decoder.scheduler.prefixes.find("me", LONG)
    assert (found is not None) is keeps_keys
    assert found is None or 0 < found[1] <= len(LONG)
