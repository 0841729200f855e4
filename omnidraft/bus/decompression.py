"""Decompress the records of a batch up to a limit, because 10 kB can decompress to 300 MB.

kafka-python decompresses a batch without a limit, so it is done here before its parser could. Snappy is not supported:
its Python package would be a dependency for batches that no writer of ours makes.
"""

import zlib
from collections.abc import Callable, Mapping
from io import BytesIO

import lz4.frame
import zstandard

MAX_OUTPUT_BYTES = 32 << 20
"""Sixteen times the largest message that our writers send."""


class DecompressionError(Exception):
    """The bytes cannot be decompressed within the limit; the message says why."""


def decompress(codec: int, packed: bytes) -> bytes:
    """Decompress with the codec of this number in a batch's attributes, 0 for none. Raises DecompressionError."""
    if codec == 0:
        return packed
    if codec not in _DECOMPRESSORS:
        raise DecompressionError(f"compression {_NAMES.get(codec, codec)} is not read; write with lz4, zstd or gzip")
    try:
        plain = _DECOMPRESSORS[codec](packed)
    except (zlib.error, RuntimeError, zstandard.ZstdError, MemoryError) as exc:
        raise DecompressionError(f"{_NAMES[codec]}: {exc}") from exc
    if len(plain) > MAX_OUTPUT_BYTES:
        raise DecompressionError(f"{_NAMES[codec]}: {len(packed):,} bytes unpack to more than {MAX_OUTPUT_BYTES:,}")
    return plain


def _gzip(packed: bytes) -> bytes:
    """Decompress the first member and ignore what follows it, as Kafka's own clients do."""
    return zlib.decompressobj(wbits=31).decompress(packed, MAX_OUTPUT_BYTES + 1)


def _lz4(packed: bytes) -> bytes:
    plain: bytes = lz4.frame.LZ4FrameDecompressor().decompress(packed, max_length=MAX_OUTPUT_BYTES + 1)
    return plain


def _zstd(packed: bytes) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_OUTPUT_BYTES)
    with decompressor.stream_reader(BytesIO(packed), read_across_frames=True) as reader:
        return reader.read(MAX_OUTPUT_BYTES + 1)


_NAMES: Mapping[int, str] = {1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
_DECOMPRESSORS: Mapping[int, Callable[[bytes], bytes]] = {1: _gzip, 3: _lz4, 4: _zstd}
