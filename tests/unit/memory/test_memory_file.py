"""The file of a memory: what is written is read, equal texts are equal bytes, and what is no memory is refused."""

import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.errors import SnapshotCorrupt
from omnidraft.memory.memory_file import MemoryFile, Owner, Owners, encode, map_file, read_columns, write_columns
from omnidraft.memory.recent_texts import MemoryText, joined
from omnidraft.memory.suffix_index import SuffixIndex
from omnidraft.traces.record import TraceRecord
from tests.memory_texts import memory, records, text

OWNER = Owner("tenant", "t")


def facts(each: MemoryText) -> tuple[object, ...]:
    place = (each.tenant, each.request, each.segment, each.time_ms, each.num_context)
    return (*place, tuple(each.ids.tolist()))


def texts_of(given_records: list[TraceRecord]) -> list[MemoryText]:
    """As a group has them."""
    texts = memory(groups={"a": "g", "b": "g", "c": "g"})
    texts.add(given_records)
    return list(texts.texts_of(Owner("group", "g")))


@given(records().filter(len))
def test_the_texts_of_a_file_are_those_that_were_written_in_their_order(given_records):
    texts = texts_of(given_records)
    read = MemoryFile(encode(OWNER, texts))
    assert read.owner == OWNER
    assert list(map(facts, read.texts())) == list(map(facts, texts))
    assert encode(OWNER, read.texts()) == encode(OWNER, texts)
    assert read.num_tokens == sum(len(each.ids) for each in texts)
    oldest = {tenant: min(each.time_ms for each in texts if each.tenant == tenant) for tenant in read.oldest_ms}
    assert read.oldest_ms == oldest


def test_segments_of_one_answer_are_one_text_and_others_are_not():
    first, second = text(1, (1, 2)), text(1, (3,), segment=1)
    other, after_a_gap = text(2, (9,)), text(1, (5,), segment=3)
    again = text(2, (7, 8), segment=1, num_context=1)
    assert joined([first, other, second, after_a_gap, again]) == [[first, second], [other], [after_a_gap], [again]]


def test_the_index_finds_what_followed_across_segments_and_never_across_answers():
    index = MemoryFile(encode(OWNER, [text(1, (1, 2)), text(2, (9, 9)), text(1, (3,), segment=1)])).index
    found = index.longest_match([1, 2])
    assert found is not None
    assert found.continuations(5) == [(3, 1)]
    found = index.longest_match([2, 3])
    assert found is not None
    assert found.continuations(5) == []


def test_a_mapped_file_may_be_deleted_and_is_not_copied(tmp_path):
    path = tmp_path / "memory"
    path.write_bytes(encode(OWNER, [text(1, tuple(range(100)))]))
    with path.open("rb") as file:
        read = map_file(file)
    path.unlink()
    assert isinstance(read.index, SuffixIndex)
    assert all(not column.flags.owndata for column in read.index.to_arrays().values())
    assert read.texts()[0].ids.tolist() == list(range(100))


@given(st.binary(max_size=40), st.integers(0, 400), st.booleans())
def test_bytes_that_are_no_memory_are_refused_and_nothing_else_happens(junk, at, is_cut):
    whole = encode(OWNER, [text(1, (1, 2, 3)), text(2, (4, 5))])
    damaged = whole[:at] if is_cut else whole[:at] + junk + whole[at + len(junk) :]
    try:
        MemoryFile(damaged).texts()
    except SnapshotCorrupt:
        return
    assert not is_cut or at >= len(whole)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 64, (2).to_bytes(8, "little") + b"{}"])
def test_what_is_empty_or_of_another_format_is_refused(content):
    with pytest.raises(SnapshotCorrupt):
        MemoryFile(content)
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        with pytest.raises(SnapshotCorrupt):
            map_file(file)


def test_a_file_of_a_later_version_is_refused():
    columns, about = read_columns(encode(OWNER, [text()]))
    with pytest.raises(SnapshotCorrupt, match="version 1"):
        MemoryFile(write_columns(columns, about | {"version": 2}))


def test_columns_do_not_depend_on_the_order_in_which_they_are_named():
    columns = {name: np.arange(3, dtype=np.uint32) for name in "abc"}
    assert write_columns(columns, {"x": 1}) == write_columns(dict(reversed(columns.items())), {"x": 1})


def test_a_tenant_that_calls_itself_like_a_group_is_not_in_it():
    owners = Owners({"a": "b"})
    assert owners.of("a") == Owner("group", "b")
    assert owners.of("b") == Owner("tenant", "b")
    assert owners.of("a").key_name != owners.of("b").key_name
