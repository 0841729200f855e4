"""Searches everything that a fleet keeps for a text: decoded ids in both vocabularies, n-grams, and plain bytes.

With all keys that are retained: whatever somebody with the settings and the disks could still read.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from torch import Tensor

from omnidraft import assembly, config
from omnidraft.assembly import Vocabularies
from omnidraft.assembly.logs import tenant_keys
from omnidraft.distill.ingest import topic_scan
from omnidraft.distill.ingest.dead_letters import ORIGINAL
from omnidraft.distill.resume_encryption import decrypt_records
from omnidraft.distill.resume_tensors import RECORD_NAME, record_of
from omnidraft.errors import ConfigError, RecordForgotten, SnapshotCorrupt, WireError
from omnidraft.ports import Message
from omnidraft.snapshots import bundle
from omnidraft.snapshots.bundle import key_id_of
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.ngram_cache import NgramCache

Ngram = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class TokenSearch:
    """A search for one text below a folder and in the log of these settings."""

    settings: config.Settings
    tokenizers: Vocabularies
    folder: Path
    text: str
    ngrams: Sequence[Ngram] = ()
    """N-grams that only this text has."""

    def places(self) -> set[str]:
        """Where it is found: topics, and files by their path below the folder."""
        found = {topic for topic in self._topics() if any(map(self._is_in_message, self._messages(topic)))}
        return found | {path.relative_to(self.folder).as_posix() for path in self._files() if self._is_in_file(path)}

    @property
    def patterns(self) -> list[bytes]:
        """The text as bytes and as packed ids; without the first and last, which depend on what stands around it."""
        encoded = [each.encode(self.text)[1:-1] for each in (self.tokenizers.drafter, self.tokenizers.target)]
        assert all(len(ids) > 4 for ids in encoded)
        return [self.text.encode(), *(np.array(ids, "<u4").tobytes() for ids in encoded)]

    def _topics(self) -> Sequence[str]:
        log = self.settings.log
        return (log.traces_topic, log.dead_letters_topic, log.control_topic)

    def _messages(self, topic: str) -> Iterator[Message]:
        with closing(assembly.log_reader(self.settings, topic)) as reader:
            yield from topic_scan.messages(reader)

    def _is_in_message(self, message: Message) -> bool:
        parts = [message.key, message.value, *message.headers.values()]
        if any(map(self._is_in_bytes, parts)):
            return True
        headers = {name.removeprefix(ORIGINAL): value for name, value in message.headers.items()}
        try:
            return self._is_in_record(codec.decode(message.value, headers))
        except WireError:
            return False

    def _is_in_bytes(self, content: bytes) -> bool:
        return any(pattern in content for pattern in self.patterns)

    def _is_in_record(self, record: TraceRecord) -> bool:
        columns = [getattr(record, each.name) for each in fields(record)]
        columns += [getattr(record.rounds, each.name) for each in fields(record.rounds)]
        arrays = [each for each in columns if isinstance(each, np.ndarray)]
        return any(self._is_in_bytes(each.astype("<u4").tobytes()) for each in arrays)

    def _files(self) -> Iterator[Path]:
        for folder, _, names in os.walk(self.folder):  # what vanishes meanwhile is passed over
            yield from (Path(folder, name) for name in sorted(names))

    def _is_in_file(self, path: Path) -> bool:
        """A file that is being written or deleted is not looked into; when the fleet has stopped, there are none."""
        try:
            return self._is_in_content(path)
        except (OSError, SnapshotCorrupt):
            if path.exists() and ".partial" not in path.as_posix():
                raise
            return False

    def _is_in_content(self, path: Path) -> bool:
        if self._is_in_bytes(path.read_bytes()):
            return True
        if path.name == Path(bundle.NGRAMS).name:
            return self._is_in_cache(bundle.ngrams(path.parents[1]))
        if (key_id := key_id_of(path.name)) is not None:
            return self._is_in_encrypted(key_id, path.read_bytes())
        if path.suffix == ".safetensors":
            return self._is_in_tensors(bundle.tensors(path.parents[1], f"{path.parent.name}/{path.name}"))
        return False

    def _is_in_cache(self, arrays: Mapping[str, np.ndarray]) -> bool:
        cache: NgramCache = assembly.ngram_cache(self.settings, self.tokenizers, arrays)
        return any(cache.lookup(draft_ids) == target_id for draft_ids, target_id in self.ngrams)

    def _is_in_encrypted(self, key_id: str, content: bytes) -> bool:
        keys = tenant_keys(self.settings)
        try:
            return keys is not None and self._is_in_bytes(keys.decrypt(key_id, content))
        except RecordForgotten:
            return False

    def _is_in_tensors(self, tensors: Mapping[str, Tensor]) -> bool:
        try:
            plain, _ = decrypt_records(tensors, tenant_keys(self.settings))
        except ConfigError:
            return False
        records = [record_of(each, plain) for name, each in plain.items() if re.fullmatch(RECORD_NAME, name)]
        return any(map(self._is_in_record, records))
