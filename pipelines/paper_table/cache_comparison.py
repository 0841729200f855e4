"""N-gram caches of several capacities and eviction rules compared: memory, hit rate, lookup time, agreement."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from omnidraft import config, wiring
from omnidraft.distill.training.learner import Learner
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.ngram_cache import MIN_LENGTH
from pipelines.paper_table.agreement import figures

Bounds = Iterator[tuple[str, dict[str, Any]]]
"""Names and changes of section `cache`."""


def compare_caches(
    settings: config.Settings, train: Sequence[TraceRecord], test: Sequence[TraceRecord]
) -> dict[str, dict[str, Any]]:
    """Fill each cache from `train` and measure it on `test`, with the base drafter."""
    tokenizers = wiring.vocabularies(settings)
    learner = wiring.learner(settings, tokenizers)
    without = learner.hits(test, with_cache=True)
    ngrams = [ngram for record in train for ngram in learner.read(record).ngrams]
    full = len({ngram.draft_ids for ngram in ngrams})
    rows = {}
    for name, section in (*_bounds(max(full, 4)), *warm_bounds(num_canonical(tokenizers))):
        cache = settings.cache.model_copy(update=section)
        learner.cache = wiring.ngram_cache(settings.model_copy(update={"cache": cache}), tokenizers, None)
        for ngram in ngrams:
            learner.cache.insert(ngram.draft_ids, ngram.target_id)
        rows[name] = _row(learner, test, without)
    return rows


def num_canonical(tokenizers: wiring.Vocabularies) -> int:
    """Return the number of canonical n-grams of a pair, which a warm cache begins with."""
    return int((tokenizers.alignment.drafts_of_target.lengths >= MIN_LENGTH).sum())


def _bounds(full: int) -> Bounds:
    """Yield the bounds of caches that begin empty, of which `full` holds all n-grams that are learned."""
    yield "one entry", {"capacity": 1}
    yield from _shares("", full)
    yield "all", {"capacity": full}


def warm_bounds(full: int) -> Bounds:
    """Yield the bounds of caches that begin with as many of `full` canonical n-grams as they hold."""
    yield from ((name, {"warm": True, **section}) for name, section in _shares("warm, ", max(full, 4)))
    yield "all, warm start", {"capacity": 2 * max(full, 4), "warm": True}


def _shares(prefix: str, full: int) -> Bounds:
    for share, capacity in (("quarter", full // 4), ("half", full // 2)):
        for eviction in ("lru", "lfu"):
            yield f"{prefix}{share}, {eviction.upper()}", {"capacity": capacity, "eviction": eviction}


def _row(learner: Learner, test: Sequence[TraceRecord], without: Sequence[np.ndarray]) -> dict[str, Any]:
    ngrams = [ngram for record in test for ngram in learner.read(record).ngrams]
    started = time.perf_counter()
    hits = sum(learner.cache.lookup(ngram.draft_ids) == ngram.target_id for ngram in ngrams)
    spent = time.perf_counter() - started
    size = learner.cache.bytes_per_entry
    return {
        "entries": len(learner.cache),
        "bytes_per_entry": size,
        "bytes": len(learner.cache) * size,
        "num_ngrams": len(ngrams),
        "hit_rate": hits / len(ngrams) if ngrams else None,
        "lookup_us": 1e6 * spent / len(ngrams) if ngrams else None,
        **figures(test, without, learner.hits(test, with_cache=True)),
    }
