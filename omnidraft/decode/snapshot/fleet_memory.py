"""The fleet's memory in a worker: the suffix indexes of one snapshot, by tenant.

Files are mapped when the snapshot is loaded; pages are read when they are used. An encrypted file is decrypted into a
temporary file without a name, which nobody else can open and nothing leaves behind. A file that an earlier snapshot had
too is not read again.
Of a tenant that is to be forgotten nothing is drafted from the moment of the order on, whatever snapshot serves.
"""

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

from omnidraft.decode.snapshot.tenant_rules import TenantRules
from omnidraft.errors import RecordForgotten, SnapshotCorrupt, UnknownKey
from omnidraft.memory.memory_file import MemoryFile, Owner, Owners, map_file
from omnidraft.memory.suffix_index import SuffixIndex
from omnidraft.ports import Metrics, RecordCipher, SnapshotVersion, UnreadableReason
from omnidraft.snapshots.bundle import MEMORY, key_id_of

UNREADABLE = "omnidraft_memory_files_unreadable_total"

logger = logging.getLogger(__name__)


class SnapshotMemory:
    """The memory of one snapshot. Any number of threads may call it."""

    def __init__(self, loader: "MemoryLoader", files: "dict[Owner, MemoryFile]") -> None:
        self._loader, self._files = loader, files

    def __call__(self, tenant: str) -> SuffixIndex | None:
        """Return the index of the texts that may be drafted for this tenant; None: there are none."""
        recorded_as = self._loader.recorded_as(tenant)
        file = None if recorded_as is None else self._files.get(self._loader.owners.of(recorded_as))
        return None if file is None or self._loader.is_forgotten(file) else file.index


class MemoryLoader:
    """Loads the memory of one pair's snapshots. One thread at a time may call `load`."""

    def __init__(
        self,
        owners: Owners,
        metrics: Metrics,
        *,
        target: str,
        cipher: RecordCipher | None = None,
        recorded_as: Callable[[str], str | None] = lambda tenant: tenant,
        rules: TenantRules | None = None,
    ) -> None:
        """
        Args:
            cipher: of the keys of the log; without it encrypted files serve nobody.
            recorded_as: returns the name under which a tenant's records are written; None: none are.
            rules: tell who was forgotten.
        """
        self.owners, self.recorded_as, self._rules = owners, recorded_as, rules or TenantRules()
        self._metrics, self._target, self._cipher = metrics, target, cipher
        self._loaded: WeakValueDictionary[str, MemoryFile] = WeakValueDictionary()
        """Checksum -> what was read of such a file, for as long as a snapshot uses it."""

    def load(self, version: SnapshotVersion | None, folder: Path | None) -> SnapshotMemory:
        """Return the memory in a verified snapshot folder; files that cannot be used are counted and left out.

        Raises:
            KeyStoreError: the key store does not answer.
        """
        checksums = version.manifest.sha256 if version else {}
        source = folder / MEMORY if folder else None
        paths = sorted(source.iterdir()) if source and source.is_dir() else []
        files = [self._load(path, checksums.get(MEMORY + path.name)) for path in paths]
        return SnapshotMemory(self, {file.owner: file for file in files if file is not None})

    def is_forgotten(self, file: MemoryFile) -> bool:
        """Return whether the file has texts of a tenant from before it was to be forgotten."""
        return any(self._rules.was_forgotten_since(tenant, oldest_ms) for tenant, oldest_ms in file.oldest_ms.items())

    def _load(self, path: Path, checksum: str | None) -> MemoryFile | None:
        reason: UnreadableReason
        try:
            file = self._loaded.get(checksum or "") or self._read(path)
        except RecordForgotten:
            reason = "forgotten"
        except UnknownKey:
            reason = "unknown_key"
        except SnapshotCorrupt as exc:
            logger.error("%s: %s is left out of the memory: %s", self._target, path.name, exc)
            reason = "damaged"
        else:
            if checksum is not None:
                self._loaded[checksum] = file
            return file
        self._metrics.add(UNREADABLE, target=self._target, reason=reason)
        return None

    def _read(self, path: Path) -> MemoryFile:
        """Raises RecordForgotten, UnknownKey, KeyStoreError, SnapshotCorrupt."""
        key_id = key_id_of(path.name)
        if key_id is None:
            with path.open("rb") as file:
                return map_file(file)
        if self._cipher is None:
            raise UnknownKey("there are no keys here")
        with tempfile.TemporaryFile() as file:
            file.write(self._cipher.decrypt(key_id, path.read_bytes()))
            file.flush()
            return map_file(file)
