"""What the arithmetic starts from: figures measured on two CPU cores, and a traffic that was recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from omnidraft.config import Settings
from omnidraft.config.sections import LearnerSettings
from omnidraft.traces import archive, codec

RECORDED = Path(__file__).parents[1] / "data" / "gsm8k_qwen1.5b.avro"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Records as workers write them."""

    tokens: tuple[int, ...]
    """Emitted tokens of each record."""
    num_bytes: tuple[int, ...]
    """Of each, before compression."""
    compressed_share: float
    """Of these bytes that a batch takes on the wire and on the broker's disk, with lz4."""

    @property
    def tokens_per_record(self) -> float:
        return sum(self.tokens) / len(self.tokens)

    @property
    def bytes_per_token(self) -> float:
        """On the broker."""
        return sum(self.num_bytes) / sum(self.tokens) * self.compressed_share


@dataclass(frozen=True, slots=True)
class Drafter:
    """Sizes of the drafter: SmolLM2-135M."""

    hidden: int = 576
    intermediate: int = 1536
    key_value: int = 192
    layers: int = 30
    vocab: int = 49152

    @property
    def num_weights(self) -> int:
        """The embedding is the output's too."""
        ends = 2 * self.hidden  # norms of a layer
        return self.vocab * self.hidden + self.layers * (sum(a * b for a, b in self._linears) + ends) + self.hidden

    def num_factors(self, rank: int) -> int:
        """Of LoRA on every linear layer but the output's."""
        return self.layers * rank * sum(a + b for a, b in self._linears)

    @property
    def _linears(self) -> Sequence[tuple[int, int]]:
        own, inner, shared = self.hidden, self.intermediate, self.key_value
        return (own, own), (own, shared), (own, shared), (own, own), (own, inner), (own, inner), (inner, own)


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one kind of fleet. The defaults are measured where the comment says so, the rest is assumed."""

    traffic: Traffic
    worker_tokens_per_s: float = 15.3
    """README.md, "What to expect": omnidraft on two cores, always busy."""
    learner_tokens_per_s: float = 57.0
    """README.md: full weights on two cores."""
    partition_records_per_s: float = 2034.6
    """docs/reliability.md, "Records a second": most of 30 kB through one partition, one writer, one reader."""
    registry_questions_per_s: float = 14.0
    """docs/scaling.md: "who is champion?" to MLflow on PostgreSQL, two server processes, on two cores that had
    other work too."""
    server_bytes_per_s: float = 1.25e9
    """Assumed: what hands out snapshots has 10 Gbit/s."""
    worker_bytes_per_s: float = 125e6
    """Assumed: a worker takes 1 Gbit/s."""
    fetch_wait_s: float = 0.5
    """Kafka's fetch.max.wait.ms: how often an idle reader of the control topic asks again."""
    retention_hours: float = 72.0
    replicas: int = 3
    settings: Settings = field(default_factory=Settings)

    @property
    def learner(self) -> LearnerSettings:
        return self.settings.learner


@cache
def recorded_traffic() -> Traffic:
    """Answers of Qwen2.5-Coder-1.5B to GSM8K, as this version writes them."""
    import lz4.frame

    records = list(archive.read(RECORDED))
    encoded = [codec.encode(record) for record in records]
    batch = b"".join(encoded)
    return Traffic(
        tuple(len(record.emitted_ids) for record in records),
        tuple(map(len, encoded)),
        len(lz4.frame.compress(batch)) / len(batch),
    )
