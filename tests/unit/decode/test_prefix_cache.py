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

PUBLIC = PROMPT * 3
OTHER_PUBLIC = (*PROMPT[:2], *PROMPT)


def cached(*texts: tuple[str, Sequence[int]], public: Sequence[Sequence[int]] = ()) -> PrefixCache:
    """Return the prefixes that ended texts of these scopes and ids leave behind."""
    decoder = Decoder(ToyTarget(TABLE), TARGET_TOKENIZER.vocabulary, public_prefixes=public)
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


@pytest.mark.parametrize("public", [[], [PUBLIC, OTHER_PUBLIC]])
def test_a_search_compares_with_prefixes_of_its_own_scope_and_public_ones_only(
    compared: list[Sequence[int]], public: list[Sequence[int]]
) -> None:
    ids = (*PUBLIC, *PROMPT)
    others = [(f"user {number}", (*ids, number)) for number in range(20)]
    prefixes = cached(("me", PROMPT), *others, ("me", PROMPT[1:]), public=public)
    compared.clear()
    found = prefixes.find("me", ids)
    assert found is not None
    assert found[1] == (len(PUBLIC) if public else len(PROMPT))
    assert sorted(map(tuple, compared)) == sorted(map(tuple, [PROMPT, PROMPT[1:], *public]))


def test_a_text_of_another_scope_is_compared_with_public_prefixes_only(compared: list[Sequence[int]]) -> None:
    ids = (*PUBLIC, *PROMPT)
    assert PrefixCache().num_shared("other", ids, "me", ids) == 0
    assert not compared
    assert PrefixCache([OTHER_PUBLIC, PUBLIC]).num_shared("other", ids, "me", ids) == len(PUBLIC)
    assert {tuple(each) for each in compared} == {OTHER_PUBLIC, PUBLIC}


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
    longer = (*PUBLIC, *PROMPT)
    prefixes = cached(("a", longer), ("b", longer), ("c", PUBLIC), ("d", PUBLIC[:-1]), public=[PUBLIC])
    # Texts c and d themselves found a and b when they began, so the order of use is a, c, b, d.
    found = [prefixes.find(scope, PUBLIC) for scope in "ccxd"]
    assert [each and (each[0].scope, each[1]) for each in found] == [(scope, len(PUBLIC)) for scope in "acba"]


def test_a_prefix_takes_the_place_of_one_that_it_continues_with_its_memory() -> None:
    alone = cached(("me", PROMPT * 2)).kv_bytes
    prefixes = cached(("me", PROMPT), ("other", PROMPT), ("me", PROMPT * 2))
    assert len(prefixes) == 2
    prefixes.evict()
    assert prefixes.kv_bytes == alone
    prefixes.clear()
    assert (len(prefixes), prefixes.kv_bytes) == (0, 0)
