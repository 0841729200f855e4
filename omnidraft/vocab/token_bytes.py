"""The exact bytes that every id of a vocabulary spells, from a tokenizer's plain data, without a tokenizer library."""

import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from functools import lru_cache

SPACE_MARKER = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(StrEnum):
    """The encoding of bytes in the strings of a vocabulary."""

    BYTE_LEVEL = "byte_level"  # GPT-2's alphabet: one visible character for each byte
    SENTENCEPIECE = "sentencepiece"  # text with a marker for the space, and <0x0A> for single bytes; Unigram too


def token_bytes(
    tokens: Mapping[str, int],
    spelling: Spelling,
    *,
    size: int,
    literal: Mapping[int, str],
    special_ids: Collection[int],
) -> tuple[bytes, ...]:
    """Return the bytes of each of `size` ids; b"" for special ids and for ids without a token.

    Args:
        tokens: the vocabulary of the tokenizer's model.
        size: rows of the model's embedding; may be more than there are tokens.
        literal: tokens added beside the table, which are text whatever the spelling; a decoder of SentencePiece turns
            its marker into a space in them too.
    """
    spell = _from_byte_level if spelling is Spelling.BYTE_LEVEL else _from_sentencepiece
    table = [b""] * size
    for token, index in tokens.items():
        if index < size:
            table[index] = spell(token)
    for index, text in literal.items():
        if index < size:
            table[index] = spell(text) if spelling is Spelling.SENTENCEPIECE else text.encode("utf-8")
    for index in special_ids:
        if index < size:
            table[index] = b""
    return tuple(table)


def fallback_ids(tokens: Mapping[str, int], spelling: Spelling) -> frozenset[int]:
    """Return the ids of single bytes by number, which text has only where no other id spells a character."""
    if spelling is Spelling.BYTE_LEVEL:
        return frozenset()
    return frozenset(index for token, index in tokens.items() if _BYTE_TOKEN.fullmatch(token))


def _from_byte_level(token: str) -> bytes:
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # a character outside the alphabet: the whole token is plain text
        return token.encode("utf-8")


def _from_sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE_MARKER, " ").encode("utf-8")


@lru_cache(maxsize=1)
def _byte_alphabet() -> Mapping[str, int]:
    """Return GPT-2's alphabet: visible Latin-1 characters are bytes themselves, U+0100 and up are the other bytes."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}
