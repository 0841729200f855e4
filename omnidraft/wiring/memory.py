"""The fleet's memory from settings: what a distiller keeps, and what a worker takes from a snapshot."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.config import MemorySettings, Settings
from omnidraft.ports import Metrics
from omnidraft.wiring.record_cipher import record_cipher
from omnidraft.wiring.recording import recorded_as
from omnidraft.wiring.vocabularies import TargetVocabulary

if TYPE_CHECKING:
    from omnidraft.decode.snapshot.fleet_memory import MemoryLoader
    from omnidraft.distill.memory.memory_files import MemoryFiles

logger = logging.getLogger(__name__)


def memory_files(settings: Settings, tokenizers: TargetVocabulary, metrics: Metrics, folder: Path) -> "MemoryFiles":
    """Return the memory of one learner and its files, staged in a folder of this learner alone."""
    from omnidraft.distill.memory.memory_files import MemoryFiles
    from omnidraft.distill.memory.text_memory import TextMemory

    memory = TextMemory(_kept(settings), vocabulary_size=len(tokenizers.target.vocabulary))
    return MemoryFiles(memory, folder, metrics, record_cipher(settings))


def memory_loader(settings: Settings, metrics: Metrics) -> "MemoryLoader":
    """Return the loader of the memory in a worker's snapshots of one pair."""
    from omnidraft.decode.snapshot.fleet_memory import MemoryLoader
    from omnidraft.memory.memory_file import Owners

    return MemoryLoader(
        Owners(settings.memory.groups),
        metrics,
        target=settings.models.target,
        cipher=record_cipher(settings),
        recorded_as=recorded_as(settings),
    )


def _kept(settings: Settings) -> MemorySettings:
    """Return the settings of the memory, which is off where its files could not be encrypted as the log is."""
    section, log = settings.memory, settings.log
    if log.encryption_keys and log.key_store_url is None and section.tokens_per_tenant:
        logger.warning("the fleet's memory is off: log.encryption_keys without log.key_store gives tenants no keys")
        return section.model_copy(update={"tokens_per_tenant": 0})
    return section
