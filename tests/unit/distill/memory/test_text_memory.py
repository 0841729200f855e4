"""The texts of the fleet's memory: by owner, the newest within the limits, and the same after a restart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.distill.memory.text_memory import PROMPT_TOKENS, TextMemory
from omnidraft.memory.memory_file import MemoryFile, Owner, encode
from tests.memory_texts import VOCABULARY_SIZE, memory, records, said

LIMITS = {"tokens_per_tenant": 20, "total_tokens": 40, "max_tenants": 2}
A = Owner("tenant", "a")

ENDS = ["stop_string", "stop", "length", None]


def files(texts: TextMemory) -> dict[Owner, bytes]:
    return {owner: encode(owner, texts.texts_of(owner)) for owner in texts.owners()}


def ids_of(texts: TextMemory, owner: Owner) -> list[list[int]]:
    return [each.ids.tolist() for each in texts.texts_of(owner)]


@given(records(), st.integers(0, 12))
def test_a_memory_that_was_restored_from_its_files_goes_on_as_one_that_never_stopped(given_records, at):
    whole, first, resumed = (memory(**LIMITS) for _ in range(3))
    whole.add(given_records[:at])
    whole.add(given_records[at:])
    first.add(given_records[:at])
    resumed.restore({owner: MemoryFile(content).texts() for owner, content in files(first).items()})
    assert resumed.changed() == []
    resumed.add(given_records[at:])
    assert files(resumed) == files(whole)


@given(records())
def test_the_limits_hold_and_every_token_is_kept_or_counted(given_records):
    texts = memory(**LIMITS)
    num_added, known = 0, set()
    for record in given_records:
        before = texts.num_tokens
        texts.add([record])
        dropped = texts.take_dropped().total()
        num_added += texts.num_tokens + dropped - before
        known.add((record.tenant, record.request_id, record.segment))
    assert len(texts.owners()) <= 2
    assert texts.num_tokens <= 40
    for owner in texts.owners():
        kept = texts.texts_of(owner)
        assert sum(len(each.ids) for each in kept) <= 20
        assert len({(each.request, each.segment) for each in kept}) == len(kept)
        assert {each.tenant for each in kept} == {owner.name}
    assert num_added >= texts.num_tokens


def test_the_oldest_texts_go_first_and_what_is_said_again_stays():
    texts = memory(tokens_per_tenant=6)
    texts.add([said("1", [1, 1, 1], tenant="a"), said("2", [2, 2, 2], tenant="a"), said("3", [1, 1, 1], tenant="a")])
    assert ids_of(texts, A) == [[2, 2, 2], [1, 1, 1]]
    assert texts.take_dropped() == {"full": 3}


def test_a_beginning_has_the_end_of_its_prompt_and_a_segment_goes_on_where_the_one_before_ended():
    texts, prompt = memory(), list(range(100, 101 + PROMPT_TOKENS))
    before = {"prompt_ids": np.array(prompt, np.uint32), "tenant": "a"}
    texts.add(
        [said("1", [1, 2], **before), said("1", [3], segment=1, before_ids=np.array([1, 2], np.uint32), **before)]
    )
    assert ids_of(texts, A) == [[*prompt[1:], 1, 2], [3]]
    texts.add([said("2", [5], segment=4, before_ids=np.array([1, 2, 3], np.uint32), **before)])
    assert ids_of(texts, A)[-1] == [1, 2, 3, 5]
    assert [each.num_context for each in texts.texts_of(A)] == [PROMPT_TOKENS, 0, 3]


def test_records_that_are_read_again_are_in_the_memory_once():
    texts = memory()
    texts.add([said("1", [1, 2], tenant="a")])
    texts.mark_written(A)
    texts.add([said("1", [1, 2], tenant="a")])
    assert ids_of(texts, A) == [[1, 2]]
    assert texts.changed() == []


def test_a_token_that_may_reach_behind_a_stop_string_is_left_out():
    texts = memory()
    texts.add([said(str(number), [1, 2, 3], tenant="a", finish_reason=why) for number, why in enumerate(ENDS)])
    assert ids_of(texts, A) == [[1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3]]


def test_ids_that_the_target_does_not_have_are_left_out_and_counted():
    texts = memory()
    texts.add([said("1", [1, VOCABULARY_SIZE], tenant="a"), said("2", [VOCABULARY_SIZE - 1], tenant="a")])
    texts.add([said("3", [1], tenant="a", prompt_ids=np.array([VOCABULARY_SIZE], np.uint32))])
    assert ids_of(texts, A) == [[VOCABULARY_SIZE - 1]]
    assert texts.take_dropped() == {"unknown_ids": 3}


def test_the_largest_memory_gives_way_to_the_others():
    texts = memory(total_tokens=10)
    for number in range(4):
        texts.add([said(f"a{number}", [1, 1, 1], tenant="a"), said(f"b{number}", [2], tenant="b")])
    assert [len(ids_of(texts, owner)) for owner in texts.owners()] == [2, 4]


def test_memories_of_tenants_that_were_heard_of_longest_ago_go_as_a_whole():
    texts = memory(max_tenants=2)
    for number, tenant in enumerate("abac"):
        texts.add([said(f"{number}", [number], tenant=tenant, time_ms=number + 1)])
    assert texts.owners() == [Owner("tenant", "a"), Owner("tenant", "c")]


def test_a_group_is_one_memory_and_a_tenant_that_left_it_takes_its_texts_along():
    together, apart = memory(groups={"a": "g", "b": "g"}), memory(groups={"b": "g"})
    together.add([said("1", [1], tenant="a"), said("2", [2], tenant="b"), said("3", [3], tenant="c")])
    group = Owner("group", "g")
    assert ids_of(together, group) == [[1], [2]]
    apart.restore({owner: MemoryFile(content).texts() for owner, content in files(together).items()})
    assert (ids_of(apart, A), ids_of(apart, group)) == ([[1]], [[2]])
    assert apart.changed() == [group, A]


@pytest.mark.parametrize("number", [0, 3])
def test_without_tokens_for_a_tenant_nothing_is_kept(number):
    texts = memory(tokens_per_tenant=number)
    texts.add([said("1", [1, 2], tenant="a")])
    assert bool(texts.owners()) is bool(number)


def test_what_is_dropped_is_gone_and_the_rest_keeps_its_order():
    texts = memory()
    texts.add([said(f"{number}", [number], tenant="ab"[number % 2], time_ms=number) for number in range(6)])
    texts.drop(lambda each: each.time_ms < 3, "expired")
    assert ids_of(texts, A) == [[4]]
    texts.drop(lambda each: each.tenant == "a", "forgotten")
    assert texts.owners() == [Owner("tenant", "b")]
    assert texts.take_dropped() == {"expired": 3, "forgotten": 1}
