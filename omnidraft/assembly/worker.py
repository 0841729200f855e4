"""The decoding worker: an engine for each target, one drafter for all, one trace producer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnidraft.assembly.host import DecodingHost, ServedTarget
from omnidraft.assembly.models import Vocabularies, served_vocabularies
from omnidraft.assembly.recording import trace_producer
from omnidraft.assembly.registries import require_named, snapshot_reader
from omnidraft.assembly.snapshot_loading import base_drafter, named_or_base
from omnidraft.config import Settings
from omnidraft.decode.engine import Engine
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.models.loading import in_own_thread
from omnidraft.ports import Metrics, Target, Tracing
from omnidraft.progress import stages

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass(frozen=True, slots=True)
class Worker:
    """The engines and the trace producer of a worker. Without a producer no traces are recorded."""

    served: tuple[ServedTarget, ...]
    """In the order of `models.targets`."""
    producer: TraceProducer | None

    @property
    def engine(self) -> Engine:
        """The engine of `models.target`."""
        return self.served[0].engine

    @property
    def target(self) -> Target:
        """The loaded `models.target`."""
        return self.served[0].target


def engine(
    settings: Settings, metrics: Metrics, *, progress: "Progress | None" = None, snapshot: str | None = None
) -> Worker:
    """Return a worker of `models.target` alone, without traces or snapshot updates.

    Args:
        snapshot: a folder, a version or an alias; None is the base drafter.

    Raises:
        ModelError, SnapshotError, VocabularyError: models or snapshot cannot be loaded, or do not belong together.
    """
    require_named(settings, snapshot)
    host = DecodingHost(settings, metrics, served_vocabularies(settings, progress))
    made = host.engine(named_or_base(settings, host.load, snapshot))
    return Worker((ServedTarget(made, host.target, host.identity, None),), None)


def worker(
    settings: Settings, metrics: Metrics, *, progress: "Progress | None" = None, tracing: Tracing | None = None
) -> Worker:
    """Return the engines, snapshot updaters and trace producer of one worker process.

    Raises:
        BusError, RegistryError: log or registry cannot be reached at the start; later they may come and go.
        ConfigError: there is no such redactor.
    """
    stages.info("opening the log and the registry")
    producer = trace_producer(settings, metrics, tracing)

    def served() -> tuple[ServedTarget, ...]:
        pairs = [settings.for_target(name) for name in settings.models.targets]
        readers = [snapshot_reader(pair) for pair in pairs]  # a wrong address is known before anything large is loaded
        for pair in pairs:
            require_named(pair, pair.worker.snapshot)
        tokenizers = [served_vocabularies(pair, progress) for pair in pairs]
        base = base_drafter(settings, tokenizers[0]) if isinstance(tokenizers[0], Vocabularies) else None
        return tuple(
            DecodingHost(pair, metrics, words, base=base, producer=producer, tracing=tracing).serve(snapshots)
            for pair, words, snapshots in zip(pairs, tokenizers, readers, strict=True)
        )

    return Worker(in_own_thread(served), producer)
