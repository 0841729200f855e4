"""Every id spells the bytes that its tokenizer would write."""

from omnidraft.models.hf.tokenizer import HfTokenizer


def test_single_bytes_and_tokens_that_look_like_them(tokenizers: dict[str, HfTokenizer]) -> None:
    spelled = tokenizers["sentencepiece"].vocabulary.token_bytes
    assert spelled[3 + 0x0A] == b"\n"
    assert spelled[3 + 0xC3] == b"\xc3"
    assert b"<0x0A>" not in spelled


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
