"""The alignment maps tokens to tokens that spell the same bytes; a file that is not of its pair is built again."""

import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from omnidraft.errors import VocabularyError
from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.vocab.alignment import Alignment, align, align_cached, pair_fingerprint
from omnidraft.vocab.tokenizer import Vocabulary
from tests.unit.vocab.conftest import saved


class ByteTokenizer:
    """The plainest tokenizer: the longest token first."""

    def __init__(self, *token_bytes: bytes, roles: dict[str, int] | None = None, special: Sequence[int] = ()) -> None:
        self.vocabulary = Vocabulary(token_bytes, roles or {}, frozenset(special))

    def encode(self, text: str) -> list[int]:
        try:
            return self.vocabulary.byte_table.longest_match(text.encode())
        except VocabularyError:
            return []

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


@pytest.mark.parametrize("draft", ["small", "large", "sentencepiece", "unigram"])
@pytest.mark.parametrize("target", ["small", "large", "sentencepiece", "unigram"])
def test_every_mapped_text_token_spells_the_same_on_both_sides(
    tokenizers: dict[str, HfTokenizer], draft: str, target: str
) -> None:
    mine, theirs = tokenizers[draft].vocabulary, tokenizers[target].vocabulary
    alignment = align(tokenizers[draft], tokenizers[target])
    for token in set(range(len(mine))) - mine.special_ids:
        pieces = alignment.pieces(token)
        assert not pieces or theirs.spell(pieces) == mine.token_bytes[token]
    for token in set(range(len(theirs))) - theirs.special_ids:
        pieces = alignment.draft_pieces(token)
        assert not pieces or mine.spell(pieces) == theirs.token_bytes[token]


def random_merges(seed: int) -> Backend:
    """Byte-level BPE whose 3,000 tokens are no words."""
    choice = random.Random(seed).choice
    tokens, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    while len(tokens) < 3000:
        pair = choice(tokens), choice(tokens)
        if len("".join(pair)) < 9 and "".join(pair) not in tokens[256:]:
            merges.append(pair)
            tokens.append("".join(pair))
    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return backend


def trained_on_docs(trainer: trainers.Trainer, backend: Backend) -> Backend:
    backend.train_from_iterator((Path(__file__).parents[3] / "docs" / "http-api.md").read_text().splitlines(), trainer)
    return backend


def bpe_of_docs() -> Backend:
    backend = random_merges(0)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained_on_docs(trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet), backend)


def unigram_of_docs() -> Backend:
    trainer = trainers.UnigramTrainer(vocab_size=2000, special_tokens=["<unk>"], unk_token="<unk>")
    backend = Backend(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return trained_on_docs(trainer, backend)


def spelled_alone(speller: HfTokenizer, vocabulary: Vocabulary, token: int) -> tuple[int, ...]:
    """What `align` maps a token to, by no table and with no other token."""
    data, known = vocabulary.token_bytes[token], speller.vocabulary.token_bytes
    if not data or vocabulary.token_bytes.index(data) != token:
        return ()
    if data in known:
        return (known.index(data),)
    ids = speller.encode(data.decode("utf-8", "replace"))
    if speller.vocabulary.spell(ids) == data:
        return tuple(ids)
    ids, rest = [], data
    while rest:
        found = [id for id, text in enumerate(known) if text and rest.startswith(text)]
        if not found:
            return ()
        ids.append(max(found, key=lambda id: (len(known[id]), -id)))
        rest = rest[len(known[ids[-1]]) :]
    return tuple(ids)


def test_thousands_of_tokens_are_mapped_as_each_alone(tmp_path: Path) -> None:
    backends = [random_merges(1), bpe_of_docs(), unigram_of_docs()]
    every = [HfTokenizer(saved(backend, tmp_path / str(number))) for number, backend in enumerate(backends)]
    for draft, target in itertools.permutations(every, 2):
        alignment = align(draft, target)
        for token in range(0, alignment.num_draft, 29):
            assert alignment.pieces(token) == spelled_alone(target, draft.vocabulary, token)
        for token in range(0, alignment.num_target, 29):
            assert alignment.draft_pieces(token) == spelled_alone(draft, target.vocabulary, token)


def test_arrays_and_pieces_agree(alignment: Alignment) -> None:
    for token in range(alignment.num_draft):
        assert alignment.first_D[token] == (*alignment.pieces(token), alignment.num_target)[0]
    for token in range(alignment.num_target):
        assert alignment.draft_first_T[token] == (*alignment.draft_pieces(token), alignment.num_draft)[0]
    assert alignment.num_direct == sum(len(alignment.pieces(token)) == 1 for token in range(alignment.num_draft)) > 300


def test_of_two_ids_with_the_same_bytes_the_lower_is_mapped_and_the_other_masked() -> None:
    alignment = align(ByteTokenizer(b"a", b"b", b"a"), ByteTokenizer(b"x", b"a", b"a"))
    assert [alignment.pieces(token) for token in range(3)] == [(1,), (), ()]
    assert [alignment.draft_pieces(token) for token in range(3)] == [(), (0,), ()]
    assert alignment.first_D.tolist() == [1, 3, 3]


def test_half_a_character_is_split_by_the_byte_table() -> None:
    alignment = align(ByteTokenizer(b"a\xe4\xbd"), ByteTokenizer(b"a", b"\xe4", b"\xbd"))
    assert alignment.pieces(0) == (0, 1, 2)


def test_special_tokens_match_by_role_whatever_their_ids() -> None:
    draft = ByteTokenizer(b"", b"", b"a", roles={"eos": 0, "unk": 1, "end_of_turn": 0}, special=[0, 1])
    target = ByteTokenizer(b"a", b"", b"", roles={"eos": 2, "unk": 1, "end_of_turn": 2}, special=[1, 2])
    alignment = align(draft, target)
    assert [alignment.pieces(token) for token in range(3)] == [(2,), (), (0,)]


def test_the_end_of_a_turn_is_matched_before_the_general_roles() -> None:
    draft = ByteTokenizer(b"", roles={"eos": 0, "end_of_turn": 0, "bos": 0}, special=[0])
    target = ByteTokenizer(b"", b"", roles={"eos": 0, "end_of_turn": 1, "bos": 0}, special=[0, 1])
    assert align(draft, target).pieces(0) == (1,)


def test_a_control_token_without_a_partner_is_unmapped_never_unknown() -> None:
    draft = ByteTokenizer(b"", b"a", roles={"think_start": 0}, special=[0])
    target = ByteTokenizer(b"a", b"", roles={"unk": 1}, special=[1])
    alignment = align(draft, target)
    assert alignment.pieces(0) == ()
    assert alignment.first_D.tolist() == [2, 0]


def test_rows_of_the_head_without_a_token_are_unmapped(alignment: Alignment, large: HfTokenizer) -> None:
    assert large.vocabulary.token_bytes[799] == b""
    assert alignment.draft_pieces(799) == ()


def test_a_second_process_reads_the_file_of_the_first(
    small: HfTokenizer, large: HfTokenizer, alignment: Alignment, tmp_path: Path
) -> None:
    align_cached(small, large, tmp_path)
    (path,) = tmp_path.iterdir()
    loaded = align_cached(small, large, tmp_path)
    assert path.stem == loaded.fingerprint == alignment.fingerprint
    np.testing.assert_array_equal(loaded.first_D, alignment.first_D)
    assert [loaded.draft_pieces(t) for t in range(800)] == [alignment.draft_pieces(t) for t in range(800)]


@pytest.mark.parametrize(
    "content", [b"", bytes(40), b"PK\x03\x04 torn", None], ids=["empty", "zeros", "cut", "another pair"]
)
def test_a_damaged_file_is_built_again(
    content: bytes | None, small: HfTokenizer, large: HfTokenizer, alignment: Alignment, tmp_path: Path
) -> None:
    path = tmp_path / f"{alignment.fingerprint}.npz"
    if content is None:
        align(large, small).save(path)
    else:
        path.write_bytes(content)
    built = align_cached(small, large, tmp_path)
    np.testing.assert_array_equal(built.first_D, alignment.first_D)
    assert Alignment.load(path).fingerprint == alignment.fingerprint
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_costs_time_only(
    small: HfTokenizer, large: HfTokenizer, alignment: Alignment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    built = align_cached(small, large, tmp_path / "file" / "alignments")
    np.testing.assert_array_equal(built.first_D, alignment.first_D)
    assert "the next start has to align the vocabularies again" in caplog.text


def test_a_file_is_on_the_disk_before_it_has_its_name(
    alignment: Alignment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync, rename = os.fsync, os.replace

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def renamed(partial: Path, final: Path) -> None:
        assert partial.stat().st_ino in synced
        rename(partial, final)

    monkeypatch.setattr("os.fsync", noted)
    monkeypatch.setattr("os.replace", renamed)
    alignment.save(tmp_path / "pair.npz")
    assert {path.stat().st_ino for path in [tmp_path, tmp_path / "pair.npz"]} <= synced


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pair.npz").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(VocabularyError, match="is no alignment"):
        Alignment.load(tmp_path / "pair.npz")


def test_the_fingerprint_depends_on_bytes_roles_and_direction() -> None:
    a, b = Vocabulary((b"ab", b"c"), {}, frozenset()), Vocabulary((b"a", b"bc"), {}, frozenset())
    with_role = Vocabulary((b"ab", b"c"), {"eos": 1}, frozenset())
    pairs = [(a, b), (b, a), (a, a), (b, b), (with_role, b)]
    assert len({pair_fingerprint(*pair) for pair in pairs}) == len(pairs)
