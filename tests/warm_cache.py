"""N-gram caches that know every merge of a pair."""

from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache


def warmed(cache: NgramCache, alignment: Alignment) -> NgramCache:
    """The cache, whatever its mode, with the drafter's spelling of every target token."""
    mode, cache.mode = cache.mode, "online"
    for token in range(alignment.num_target):
        if len(pieces := alignment.draft_pieces(token)) > 1:
            cache.insert(pieces, token)
    cache.mode = mode
    return cache
