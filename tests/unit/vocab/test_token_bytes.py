"""Every id spells the bytes that its tokenizer would write."""

from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.vocab.token_bytes import Spelling, token_bytes


def test_sentencepiece_tokens_spell_the_space_marker_and_single_bytes() -> None:
    tokens = {"\u2581the": 0, "<0x0A>": 1, "<0xC3>": 2, "\u00e9": 3, "<0x0A>x": 4}
    assert token_bytes(tokens, Spelling.SENTENCEPIECE, size=5, literal={}, special_ids=()) == (
        b" the", b"\n", b"\xc3", b"\xc3\xa9", b"<0x0A>x",
    )  # fmt: skip


def test_special_tokens_and_rows_without_a_token_spell_nothing() -> None:
    spelled = token_bytes({"a": 0}, Spelling.BYTE_LEVEL, size=5, literal={1: "<eos>", 2: "\u0120x"}, special_ids={1, 4})
    assert spelled == (b"a", b"", "\u0120x".encode(), b"", b"")


def test_bytes_of_every_id_agree_with_the_tokenizers_own_decoder(tokenizer: HfTokenizer) -> None:
    vocabulary = tokenizer.vocabulary
    ids = [i for i, spelled in enumerate(vocabulary.token_bytes) if spelled and _is_text(spelled)]
    anchor = vocabulary.byte_table.get(b"a")  # a decoder may strip the first space of a text
    assert anchor is not None
    assert len(ids) > 50
    for token in ids:
        assert "a" + vocabulary.token_bytes[token].decode() == tokenizer._backend.decode([anchor, token])


def _is_text(spelled: bytes) -> bool:
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return False
    return True
