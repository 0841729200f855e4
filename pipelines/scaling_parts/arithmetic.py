"""What so many workers give and need. One property per figure, each one line of arithmetic."""

from dataclasses import dataclass, field
from math import ceil

from omnidraft.vocab.ngram_table import ENTRY
from pipelines.scaling_parts.measured import Drafter, Measured

HEADROOM = 2.0
"""Partitions carry half of what they can."""
LEARNER_CHOICE = 10.0
"""The log carries so many times what the learner learns, so that it can choose evenly over tenants."""
ANNOUNCEMENT_BYTES = 200
FANOUT_SHARE = 0.1
"""Of the time between two snapshots, that handing one out may take."""
BYTES_PER_WEIGHT, BYTES_PER_FACTOR = 2, 4


@dataclass(frozen=True, slots=True)
class Fleet:
    """A number of workers that are always busy."""

    num_workers: int
    measured: Measured
    drafter: Drafter = field(default_factory=Drafter)

    # ------------------------------------------------ traces

    @property
    def tokens_per_s(self) -> float:
        return self.num_workers * self.measured.worker_tokens_per_s

    @property
    def records_per_s(self) -> float:
        return self.tokens_per_s / self.measured.traffic.tokens_per_record

    @property
    def log_bytes_per_s(self) -> float:
        """Into the topic, compressed, once."""
        return self.tokens_per_s * self.measured.traffic.bytes_per_token

    @property
    def log_bytes_kept(self) -> float:
        """On all brokers."""
        return self.log_bytes_per_s * self.measured.retention_hours * 3600 * self.measured.replicas

    @property
    def partitions(self) -> int:
        return ceil(HEADROOM * self.records_per_s / self.measured.partition_records_per_s)

    # ------------------------------------------------ learner

    @property
    def learned_share(self) -> float:
        """Of all tokens, that one learner learns."""
        return min(1.0, self.measured.learner_tokens_per_s / self.tokens_per_s)

    @property
    def learned_records_per_s(self) -> float:
        return self.measured.learner_tokens_per_s / self.measured.traffic.tokens_per_record

    @property
    def learner_age_s(self) -> float:
        """Mean age of a record when it is learned by a learner that cannot keep up.

        It learns a share of the requests that wait, and meanwhile falls behind; then, as long as no more wait than are
        allowed, it learns in order and falls behind further; then comes the next range.
        """
        come, learned = self.records_per_s, self.learned_records_per_s
        sample, most = self.measured.learner.lag_sample_records, self.measured.learner.max_lag_records
        if come <= learned or not most:
            raise ValueError("this learner keeps up, or learns everything however late")
        waiting = sample / learned * come
        of_sample_s = (max(most, waiting) / come + sample / learned) / 2
        in_order = max(0.0, (most - waiting) / (come - learned) * learned)
        in_order_s = (waiting + most) / 2 / come
        return (sample * of_sample_s + in_order * in_order_s) / (sample + in_order)

    @property
    def num_recorders(self) -> int:
        """Workers that have to record: `recorder.enabled` of the others can be false."""
        asked = LEARNER_CHOICE * self.measured.learner_tokens_per_s / self.measured.worker_tokens_per_s
        return min(self.num_workers, ceil(asked))

    @property
    def snapshot_interval_s(self) -> float:
        """With the default `steps_per_snapshot`, as long as there is enough to learn."""
        return self.measured.learner.steps_per_snapshot * self.step_s

    @property
    def step_s(self) -> float:
        """Of the learner: computing, or waiting for records."""
        tokens = self.measured.learner.records_per_step * self.measured.traffic.tokens_per_record
        return tokens / min(self.measured.learner_tokens_per_s, self.tokens_per_s)

    # ------------------------------------------------ fan-out

    @property
    def full_bytes(self) -> int:
        """Of a snapshot's serving part with all weights in bfloat16 and a full n-gram cache."""
        return self.drafter.num_weights * BYTES_PER_WEIGHT + self._cache_bytes

    @property
    def lora_bytes(self) -> int:
        """The same with LoRA factors in float32."""
        return self.drafter.num_factors(self.measured.learner.lora_rank) * BYTES_PER_FACTOR + self._cache_bytes

    @property
    def _cache_bytes(self) -> int:
        return int(self.measured.settings.cache.capacity) * ENTRY.itemsize

    def fanout_s(self, num_bytes: int) -> float:
        """From the announcement until the last worker has it, all from one server."""
        server_s = self.num_workers * num_bytes / self.measured.server_bytes_per_s
        return max(server_s, num_bytes / self.measured.worker_bytes_per_s)

    def least_steps(self, num_bytes: int) -> int:
        """`learner.steps_per_snapshot` with which handing out takes FANOUT_SHARE of the time."""
        return max(
            self.measured.learner.steps_per_snapshot, ceil(self.fanout_s(num_bytes) / FANOUT_SHARE / self.step_s)
        )

    @property
    def announcement_bytes(self) -> int:
        """Of one announcement to all."""
        return self.num_workers * ANNOUNCEMENT_BYTES

    @property
    def control_fetches_per_s(self) -> float:
        """That idle followers cost the brokers, nearly all of them empty."""
        return self.num_workers / self.measured.fetch_wait_s

    @property
    def registry_questions_per_s(self) -> float:
        """With the default `worker.poll_s`."""
        return self.num_workers / self.measured.settings.worker.poll_s

    @property
    def least_poll_s(self) -> float:
        """`worker.poll_s` with which MLflow is asked half as often as it can answer."""
        least = HEADROOM * self.num_workers / self.measured.registry_questions_per_s
        return max(self.measured.settings.worker.poll_s, least)
