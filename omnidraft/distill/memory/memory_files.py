"""The files of the fleet's memory in snapshots, one an owner.

A file that did not change since the last snapshot is the same file, with the same checksum: registries of folders link
it. It is kept here between snapshots, and taken over from the snapshot that learning resumes from.
With a cipher the content is encrypted with the owner's key. Its name tells nobody whose it is; see
snapshots/memory_part.py.
"""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.errors import ConfigError, RecordForgotten, SnapshotCorrupt, StorageError, UnknownKey
from omnidraft.files import link_or_copy, written_aside
from omnidraft.memory.memory_file import MemoryFile, Owner, encode
from omnidraft.memory.recent_texts import MemoryText
from omnidraft.ports import Metrics, RecordCipher, UnreadableReason
from omnidraft.private_files import PRIVATE, USUAL
from omnidraft.snapshots.bundle import MEMORY, encrypted_name, is_private, key_id_of, plain_name

DROPPED = "omnidraft_memory_tokens_dropped_total"
FILES_DROPPED = "omnidraft_memory_files_dropped_total"

logger = logging.getLogger(__name__)


class MemoryFiles:
    """Writes the files of one learner's memory, and reads those of a snapshot. It belongs to one thread."""

    def __init__(self, memory: TextMemory, folder: Path, metrics: Metrics, cipher: RecordCipher | None = None) -> None:
        """`folder` belongs to this learner alone. `cipher` encrypts the files; None leaves them plain."""
        self.memory, self.cipher = memory, cipher
        self._folder, self._metrics = folder, metrics
        self._written: dict[Owner, Path] = {}

    def stage(self) -> dict[str, Path]:
        """Write the files of changed memories, and return all files by their names in a snapshot. A file that something
        else deleted, such as a job that cleans /tmp, is written anew.

        Raises:
            StorageError: they cannot be written; trying again goes on with those that are missing.
            KeyStoreError: the key store does not answer; likewise.
        """
        for owner in [owner for owner, path in self._written.items() if not path.exists()]:
            del self._written[owner]
            self.memory.mark_changed(owner)
        for owner in self.memory.changed():
            self._write(owner)
            self.memory.mark_written(owner)
        for reason, number in self.memory.take_dropped().items():
            self._metrics.add(DROPPED, number, reason=reason)
        self._metrics.set("omnidraft_memory_tokens", self.memory.num_tokens)
        self._metrics.set("omnidraft_memory_tenants", len(self.memory.owners()))
        return {MEMORY + path.name: path for path in self._written.values()}

    def restore(self, folder: Path) -> None:
        """Go on with the memory in a snapshot's folder, if there is any.

        Raises:
            ConfigError: it is encrypted with a key that is not known.
            KeyStoreError: the key store does not answer.
            StorageError: the files cannot be taken over.
        """
        self._written = {}
        shutil.rmtree(self._folder, ignore_errors=True)
        paths = sorted((folder / MEMORY).iterdir()) if (folder / MEMORY).is_dir() else []
        read = {file.owner: (path, file) for path in paths if (file := self._read(path)) is not None}
        self.memory.restore({owner: file.texts() for owner, (_, file) in read.items()})
        for owner, (path, _) in read.items():
            if (key_id_of(path.name) is None) is (self.cipher is None):
                self._take_over(owner, path)
            else:
                self.memory.mark_changed(owner)  # encryption was turned on or off since

    def _read(self, path: Path) -> MemoryFile | None:
        """Return a file's content, None when nobody can read it any more. Raises ConfigError, KeyStoreError."""
        key_id, content = key_id_of(path.name), path.read_bytes()
        try:
            return MemoryFile(content if key_id is None else self._decrypt(key_id, content))
        except RecordForgotten:
            self._count_dropped("forgotten")
        except UnknownKey as exc:
            advice = "set log.encryption_keys and log.key_store as they were when the snapshot was published"
            raise ConfigError(f"the newest snapshot has an encrypted memory: {exc}; {advice}") from exc
        except SnapshotCorrupt as exc:
            logger.error("%s is left out of the memory: %s", path.name, exc)
            self._count_dropped("damaged")
        return None

    def _decrypt(self, key_id: str, content: bytes) -> bytes:
        if self.cipher is None:
            raise UnknownKey("there are no keys here")
        return self.cipher.decrypt(key_id, content)

    def _count_dropped(self, reason: UnreadableReason) -> None:
        self._metrics.add(FILES_DROPPED, reason=reason)

    def _take_over(self, owner: Owner, path: Path) -> None:
        """Keep a snapshot's file for the next ones, by another name of the same file."""
        try:
            link_or_copy(path, self._folder / path.name)
        except OSError as exc:
            raise StorageError(f"the memory cannot be staged in {self._folder}: {exc}; free space there") from exc
        self._written[owner] = self._folder / path.name

    def _write(self, owner: Owner) -> None:
        before, texts = self._written.pop(owner, None), self.memory.texts_of(owner)
        named = self._encrypt(owner, encode(owner, texts)) if texts else None
        if len(kept := self._without_forgotten(texts)) < len(texts):
            named = self._encrypt(owner, encode(owner, kept)) if kept else None
        if named is not None:
            self._written[owner] = self._put(*named)
        if before is not None and before != self._written.get(owner):
            before.unlink(missing_ok=True)

    def _without_forgotten(self, texts: Sequence[MemoryText]) -> Sequence[MemoryText]:
        """Return the texts without those from before their tenant was forgotten. It is asked after a key was chosen,
        which may be a new one because the one before was destroyed. Raises KeyStoreError."""
        if self.cipher is None or not texts:
            return texts
        forgotten_ms = self.cipher.forgotten_ms({each.tenant for each in texts})
        return [each for each in texts if each.time_ms > forgotten_ms.get(each.tenant, -1)]

    def _encrypt(self, owner: Owner, plain: bytes) -> tuple[str, bytes]:
        """Return name and content of a file. Raises KeyStoreError."""
        if self.cipher is None:
            return plain_name(owner.kind, owner.name), plain
        key_id, token = self.cipher.encrypt(owner.key_name, plain)
        return encrypted_name(owner.kind, key_id), token

    def _put(self, name: str, content: bytes) -> Path:
        """Write a file in the place of the one before, which stays as it is in the snapshots that have it."""
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with written_aside(path, PRIVATE if is_private(MEMORY + name) else USUAL) as file:
                file.write(content)
        except OSError as exc:
            raise StorageError(f"the memory cannot be staged in {self._folder}: {exc}; free space there") from exc
        return path
