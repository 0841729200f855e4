"""The same figures from events: texts that end, a learner that falls behind, downloads that share a server.

Nothing here uses the arithmetic; tests hold the two against each other.
"""

from collections import deque
from dataclasses import dataclass
from itertools import count

import numpy as np

from pipelines.scaling_parts.measured import Measured

MAX_RECORDS = 400_000
LEAST_TEXTS = 25
"""Of each worker that is played."""


@dataclass(frozen=True, slots=True)
class Traces:
    """What came into the log."""

    records_per_s: float
    bytes_per_s: float
    busiest_partition_records_per_s: float


def traces(num_workers: int, measured: Measured, num_partitions: int, rng: np.random.Generator) -> Traces:
    """Workers write text after text, from a random moment of one on; records go to partitions by their key."""
    lengths, sizes = np.array(measured.traffic.tokens), np.array(measured.traffic.num_bytes)
    per_worker = max(LEAST_TEXTS, MAX_RECORDS // num_workers)
    num_cohort = min(num_workers, MAX_RECORDS // per_worker)  # of a larger fleet a part is played, and counts for all
    drawn = rng.integers(len(lengths), size=(num_cohort, per_worker))
    drawn[:, 0] = rng.choice(
        len(lengths), size=num_cohort, p=lengths / lengths.sum()
    )  # a look meets long texts more often
    seconds = lengths[drawn] / measured.worker_tokens_per_s
    seconds[:, 0] *= rng.uniform(size=num_cohort)
    ends = np.cumsum(seconds, axis=1)
    until_s = per_worker / 4 * lengths.mean() / measured.worker_tokens_per_s
    assert ends[:, -1].min() > until_s  # nobody has run out of texts
    has_come = ends <= until_s
    scale = num_workers / num_cohort / until_s
    keys = rng.integers(num_partitions, size=int(has_come.sum()))
    return Traces(
        float(has_come.sum() * scale),
        float(sizes[drawn][has_come].sum() * measured.traffic.compressed_share * scale),
        float(np.bincount(keys, minlength=num_partitions).max() * scale),
    )


@dataclass(frozen=True, slots=True)
class Learned:
    """What became of the records."""

    share: float
    """Of the tokens that came."""
    mean_age_s: float
    """Of a record when it was learned."""


def learner(records_per_s: float, measured: Measured, hours: float, rng: np.random.Generator) -> Learned:
    """It learns what comes in order; too far behind, a share of what waits, as distill/ingest/catch_up.py does.

    The first half of the time is not counted: the learner falls behind in it.
    """
    lengths, settings = np.array(measured.traffic.tokens), measured.learner
    end_s, now_s, position = hours * 3600, 0.0, 0.0
    range_end, share = 0.0, 1.0  # records before `range_end` are learned at this share
    records_per_snapshot = settings.steps_per_snapshot * settings.records_per_step
    learned_tokens, ages = 0, []
    for num_learned in count():
        if now_s >= end_s:
            break
        num_waiting = records_per_s * now_s - position
        is_behind = settings.max_lag_records and num_waiting > settings.max_lag_records
        if is_behind and position >= range_end and num_learned % records_per_snapshot == 0:
            range_end, share = position + num_waiting, min(1.0, settings.lag_sample_records / num_waiting)
        position += int(rng.geometric(share)) if position < range_end else 1
        now_s = max(now_s, position / records_per_s)  # it may have to wait for it
        tokens = int(rng.choice(lengths))
        now_s += tokens / measured.learner_tokens_per_s
        if now_s > end_s / 2:
            learned_tokens += tokens
            ages.append(now_s - position / records_per_s)
    come_tokens = records_per_s * end_s / 2 * lengths.mean()
    return Learned(min(1.0, learned_tokens / come_tokens), float(np.mean(ages)))


def fanout_s(num_workers: int, num_bytes: int, measured: Measured, rng: np.random.Generator) -> float:
    """From the announcement until the last worker has the snapshot.

    Workers hear of it at some moment of their wait, and those that load at the same time share the server.
    """
    hears = np.sort(rng.uniform(0, measured.fetch_wait_s, num_workers))
    loading: deque[float] = deque()  # bytes per worker handed out when each will be done; first come, first done
    now_s, handed_out, next_to_hear = 0.0, 0.0, 0
    while loading or next_to_hear < num_workers:
        rate = min(measured.worker_bytes_per_s, measured.server_bytes_per_s / max(1, len(loading)))
        done_s = now_s + (loading[0] - handed_out) / rate if loading else np.inf
        hears_s = hears[next_to_hear] if next_to_hear < num_workers else np.inf
        if hears_s < done_s:
            handed_out += (hears_s - now_s) * rate
            loading.append(handed_out + num_bytes)
            now_s, next_to_hear = hears_s, next_to_hear + 1
        else:
            handed_out, now_s = loading.popleft(), done_s
    return float(now_s)
