"""The n-gram cache by itself: bounds and eviction rules, their memory, hit rate and speed."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from omnidraft import config, wiring
from omnidraft.distill.training.learner import Learner
from omnidraft.traces.record import TraceRecord
from pipelines.lib.learning import measured

WARM_CAPACITY = 200_000


def caches(
    settings: config.Settings, chosen: Sequence[TraceRecord], judging: Sequence[TraceRecord]
) -> dict[str, dict[str, Any]]:
    """Each cache filled from `chosen` and judged on `judging`, with the base drafter."""
    words = wiring.vocabularies(settings)
    learner = wiring.learner(settings, words)
    ngrams = [ngram for record in chosen for ngram in learner.read(record).ngrams]
    full = len({ngram.draft_ids for ngram in ngrams})
    rows = {}
    for name, section in _bounds(max(full, 4)):
        cache = settings.cache.model_copy(update=section)
        learner.cache = wiring.ngram_cache(settings.model_copy(update={"cache": cache}), words, None)
        for ngram in ngrams:
            learner.cache.insert(ngram.draft_ids, ngram.target_id)
        rows[name] = _row(learner, judging)
    return rows


def _bounds(full: int) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "one entry", {"capacity": 1}
    for share, capacity in (("quarter", full // 4), ("half", full // 2)):
        for eviction in ("lru", "lfu"):
            yield f"{share}, {eviction.upper()}", {"capacity": capacity, "eviction": eviction}
    yield "all", {"capacity": full}
    yield "all, warm start", {"capacity": WARM_CAPACITY, "warm": True}


def _row(learner: Learner, judging: Sequence[TraceRecord]) -> dict[str, Any]:
    point = measured(learner, judging)
    wanted = [ngram for record in judging for ngram in learner.read(record).ngrams]
    started = time.perf_counter()
    hits = sum(learner.cache.lookup(ngram.draft_ids) == ngram.target_id for ngram in wanted)
    spent = time.perf_counter() - started
    size = learner.cache.bytes_per_entry
    return {
        "entries": len(learner.cache),
        "bytes_per_entry": size,
        "bytes": len(learner.cache) * size,
        "hit_rate": hits / len(wanted) if wanted else None,
        "lookup_us": 1e6 * spent / len(wanted) if wanted else None,
        "agreement": point.agreement,
        "tokens_per_pass": point.tokens_per_pass,
    }
