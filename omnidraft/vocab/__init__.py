"""Two tokenizers, one text: exact bytes of every token, their alignment, the n-gram cache, re-tokenising a tail."""
