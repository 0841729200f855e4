"""N-gram caches of several capacities and eviction rules compared: memory, hit rate, lookup time, agreement."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from omnidraft import config, wiring
from omnidraft.distill.training.learner import Learner
from omnidraft.traces.record import TraceRecord
from pipelines.lib.learning import measure

WARM_CAPACITY = 200_000


def compare_caches(
    settings: config.Settings, train: Sequence[TraceRecord], test: Sequence[TraceRecord]
) -> dict[str, dict[str, Any]]:
    """Fill each cache from `train` and measure it on `test`, with the base drafter."""
    tokenizers = wiring.vocabularies(settings)
    learner = wiring.learner(settings, tokenizers)
    ngrams = [ngram for record in train for ngram in learner.read(record).ngrams]
    full = len({ngram.draft_ids for ngram in ngrams})
    rows = {}
    for name, section in _bounds(max(full, 4)):
        cache = settings.cache.model_copy(update=section)
        learner.cache = wiring.ngram_cache(settings.model_copy(update={"cache": cache}), tokenizers, None)
        for ngram in ngrams:
            learner.cache.insert(ngram.draft_ids, ngram.target_id)
        rows[name] = _row(learner, test)
    return rows


def _bounds(full: int) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "one entry", {"capacity": 1}
    for share, capacity in (("quarter", full // 4), ("half", full // 2)):
        for eviction in ("lru", "lfu"):
            yield f"{share}, {eviction.upper()}", {"capacity": capacity, "eviction": eviction}
    yield "all", {"capacity": full}
    yield "all, warm start", {"capacity": WARM_CAPACITY, "warm": True}


def _row(learner: Learner, test: Sequence[TraceRecord]) -> dict[str, Any]:
    point = measure(learner, test)
    ngrams = [ngram for record in test for ngram in learner.read(record).ngrams]
    started = time.perf_counter()
    hits = sum(learner.cache.lookup(ngram.draft_ids) == ngram.target_id for ngram in ngrams)
    spent = time.perf_counter() - started
    size = learner.cache.bytes_per_entry
    return {
        "entries": len(learner.cache),
        "bytes_per_entry": size,
        "bytes": len(learner.cache) * size,
        "hit_rate": hits / len(ngrams) if ngrams else None,
        "lookup_us": 1e6 * spent / len(ngrams) if ngrams else None,
        "agreement": point.agreement,
        "tokens_per_pass": point.tokens_per_pass,
    }
