"""A snapshot of its own for each method that is compared, so that none drafts with what another one learned."""

from omnidraft import assembly
from omnidraft.assembly.snapshot_loading import named_or_base
from omnidraft.config import Settings
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.telemetry.metrics import CountingMetrics


def own_snapshot(settings: Settings, worker: assembly.Worker, name: str | None) -> LoadedSnapshot:
    """Load a snapshot for the worker's engine. Its n-gram cache, which learns while it decodes, is no other one's.

    Args:
        settings: how it drafts; the target is the worker's.
        name: a folder, version or alias; None is the base drafter.

    Raises:
        SnapshotError, ModelError: it cannot be loaded.
    """
    costs = worker.engine.decoder.costs or MeasuredCosts(worker.target)
    memories = assembly.memory_loader(settings, CountingMetrics())
    tokenizers = assembly.served_vocabularies(settings)
    has_drafter = settings.models.has_drafter
    shared = assembly.shared_drafting(settings.decode, costs, worker.engine.recent, has_drafter=has_drafter)
    load = assembly.snapshot_loader(settings, tokenizers, shared, memories=memories)
    return named_or_base(settings, load, name)
