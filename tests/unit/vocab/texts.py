"""Texts that are hard to cut: runs of spaces, newlines, digits, long words, marks, scripts without spaces, emoji."""

from hypothesis import strategies as st

_PIECES = (
    "the", " river", "river", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " ", "a", "'s", "don't", ".", "...", "(", ")!",
    "_", "<|im_end|>", "<tool_call>", "</s>", "1", "1984", "3.14", "x" * 300, " " * 300, "\u4f60\u597d", "\uff0c",
    "\u3002", "caf\u00e9", "e\u0301", "\u0301", "\u0928\u092e\u0938\u094d\u0924\u0947", "\U0001f600",
    "\U0001f468\u200d\U0001f469", "\u00a0",
    "\u2581", "\x00", "\x1c", "\u00b2",
)  # fmt: skip

TEXTS = st.lists(st.sampled_from(_PIECES) | st.text(max_size=4), max_size=12).map("".join)
DATA = st.lists(TEXTS.map(str.encode) | st.binary(max_size=4), max_size=4).map(b"".join)
ODD = st.lists(st.sampled_from([piece.encode() for piece in _PIECES]) | st.binary(max_size=4), max_size=6).map(b"".join)
"""Like DATA, at half the price of making it."""
