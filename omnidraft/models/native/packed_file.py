"""A file of packed weights, mapped into memory, or read into it where there is plenty.

The format is safetensors with one tensor of bytes for each part. The header's metadata says what was packed, the
checksums of the parts and of the header itself, and the time of the file. Opening compares header, size and time;
`verify` reads everything.
The processes of a machine share the pages of a mapped file. But the kernel maps them in huge pages only as far as they
were read in large pieces and lie together: on a virtual machine with two thirds of them huge, a plain pass took 28.8 ms
beside 19.6 over a copy in anonymous huge pages (Qwen2.5-Coder-0.5B in int8).
"""

import fcntl
import json
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from omnidraft import throttle
from omnidraft.errors import ModelCorrupt
from omnidraft.files import written_aside
from omnidraft.models.native.matrix import address_of, memory
from omnidraft.models.native.packed_model import Part
from omnidraft.private_files import PRIVATE, require_unshared_file
from omnidraft.system import available_memory

_PAGE = 4096
"""Parts begin behind a header of whole pages."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 24
_TIME_STEP_S = 2
"""The coarsest time stamps of a file system (FAT)."""
_NO_CHECKSUM = "0" * 8

_PLENTY = 4
"""Times its size that must be free for a file to be copied: another process may load the same one at this moment."""

Description = Mapping[str, Any]
Progress = Callable[[int, int], None]
"""Takes the bytes written so far, and all."""


class PackedFile:
    """An open file of packed weights. It is in use, as `is_in_use` tells other processes, as long as this lives."""

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            ModelCorrupt: header, size or time are not those of a complete file.
            OSError: it cannot be read, or others could have written it.
        """
        self.path = path
        with path.open("rb") as file:
            require_unshared_file(path, os.fstat(file.fileno()))
            fcntl.flock(file, fcntl.LOCK_SH)  # the mapping keeps the file's description open, and so the lock
            self._header, start = _read_header(file.fileno(), path)
            status = os.fstat(file.fileno())
            self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        metadata: dict[str, str] = self._header.pop("__metadata__")
        self.description: Description = json.loads(metadata["description"])
        self._checksums: dict[str, str] = json.loads(metadata["checksums"])
        ends = [start + part["data_offsets"][1] for part in self._header.values()]
        if len(self._map) != ends[-1] or status.st_mtime_ns != int(metadata["written_s"]) * 10**9:
            raise ModelCorrupt(f"{path} is incomplete, or was changed after it was written")
        self._spans = dict(zip(self._header, pairwise((start, *ends)), strict=True))
        self._bytes = np.frombuffer(self._map, np.uint8)
        for advice in ("MADV_HUGEPAGE", "MADV_WILLNEED"):  # then a cold file is read into huge pages
            with suppress(AttributeError, OSError):
                self._map.madvise(getattr(mmap, advice))

    def copy(self) -> None:
        """Read the parts into memory of this process, in huge pages, where there is plenty; see above."""
        if available_memory() > _PLENTY * len(self._map):
            copied = memory(len(self._map))
            for to, part in zip(_chunks(memoryview(copied)), _chunks(memoryview(self._map)), strict=True):
                to[:] = part
                throttle.rest()
            self._bytes = np.frombuffer(copied, np.uint8)

    @property
    def addresses(self) -> dict[str, int]:
        """The address of each part."""
        base: int = self._bytes.ctypes.data
        return {name: base + start for name, (start, _) in self._spans.items()}

    def verify(self) -> None:
        """Compare all parts with their checksums. Raises ModelCorrupt."""
        for name, (start, end) in self._spans.items():
            if _checksum(self._bytes[start:end]) != self._checksums.get(name):
                raise ModelCorrupt(f"{self.path}: the checksum of {name} does not match")


def write(path: Path, description: Description, parts: Sequence[Part], progress: Progress) -> PackedFile:
    """Pack the parts into a file written aside, verify it, rename it and return it.

    Raises:
        OSError: the disk is full, or nothing can be written there.
        ModelCorrupt: the file is not what was written.
    """
    checksums = dict.fromkeys((part.name for part in parts), _NO_CHECKSUM)
    written_s = int(time.time()) // _TIME_STEP_S * _TIME_STEP_S
    with written_aside(path, PRIVATE) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start = len(_header(description, parts, checksums, written_s))
        total = start + sum(part.padded_bytes for part in parts)
        os.posix_fallocate(file.fileno(), 0, total)  # a full disk shows before the work
        file.seek(start)
        for part in parts:
            checksums[part.name] = _append(file.fileno(), part)
            progress(file.tell(), total)
        os.pwrite(file.fileno(), _header(description, parts, checksums, written_s), 0)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the disk is verified
        os.utime(file.name, (written_s, written_s))
        fcntl.flock(file, fcntl.LOCK_UN)
        packed = PackedFile(Path(file.name))
        packed.verify()
    packed.path = path
    return packed


def _append(file: int, part: Part) -> str:
    """Write a part at the end of a file and return its checksum."""
    block = memory(part.padded_bytes)
    part.write(address_of(block))
    for chunk in _chunks(memoryview(block)):
        rest = chunk
        while rest:
            rest = rest[os.write(file, rest) :]
        throttle.rest()
    return _checksum(memoryview(block))


def is_in_use(path: Path) -> bool:
    """Return whether a process has mapped this file, or is writing it, or it is another user's. A file that is gone is
    not in use."""
    try:
        with path.open("r+b") as file:  # NFS grants this lock to writers only
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):
        return True
    return False


def _header(description: Description, parts: Sequence[Part], checksums: Mapping[str, str], written_s: int) -> bytes:
    """Return the header, whose size does not depend on the checksums."""
    header: dict[str, Any] = {
        "__metadata__": {
            "description": json.dumps(description),
            "checksums": json.dumps(checksums),
            "written_s": str(written_s),
        }
    }
    end = 0
    for part in parts:
        start, end = end, end + part.padded_bytes
        header[part.name] = {"dtype": "U8", "shape": [part.padded_bytes], "data_offsets": [start, end]}
    header["__metadata__"]["checksum"] = _header_checksum(header)
    text = json.dumps(header).encode()
    size = -(-(_LENGTH_BYTES + len(text)) // _PAGE) * _PAGE - _LENGTH_BYTES
    return size.to_bytes(_LENGTH_BYTES, "little") + text.ljust(size)


def _header_checksum(header: Mapping[str, Any]) -> str:
    metadata = {name: value for name, value in header["__metadata__"].items() if name != "checksum"}
    return _checksum(json.dumps({**header, "__metadata__": metadata}).encode())


def _read_header(file: int, path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the position of the first part. Raises ModelCorrupt."""
    size = int.from_bytes(os.pread(file, _LENGTH_BYTES, 0), "little")
    try:
        header: dict[str, Any] = json.loads(os.pread(file, min(size, _MAX_HEADER_BYTES), _LENGTH_BYTES))
        is_whole = header["__metadata__"]["checksum"] == _header_checksum(header)
    except (ValueError, KeyError, TypeError) as exc:
        raise ModelCorrupt(f"{path} has no header of packed weights") from exc
    if not is_whole:
        raise ModelCorrupt(f"{path}: the checksum of the header does not match")
    return header, _LENGTH_BYTES + size


def _checksum(data: Any) -> str:
    """Return the CRC-32 of these bytes, which finds every single flipped byte."""
    value = 0
    for chunk in _chunks(memoryview(data)):
        value = zlib.crc32(chunk, value)
        throttle.rest()
    return f"{value:08x}"


def _chunks(data: memoryview) -> Iterator[memoryview]:
    size = 1 << 22
    return (data[start : start + size] for start in range(0, len(data), size))
