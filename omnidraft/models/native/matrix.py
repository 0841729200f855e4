"""Pack a matrix for kernels.cpp, and allocate memory for it.

Shapes: N output channels, K input channels.
"""

import ctypes
import mmap
from contextlib import suppress

import torch

from omnidraft import throttle
from omnidraft.models.native import library as native

_CHUNK_WEIGHTS = 2**18
"""Weights that are packed at once."""


def pack(library: ctypes.CDLL, kind: int, weight_NK: torch.Tensor, to: int, stride: int = 1, offset: int = 0) -> None:
    """Write a matrix to the address `to`, block by block; block b becomes block number b * stride + offset."""
    channels, inputs = weight_NK.shape
    block_bytes = library.omnidraft_packed_bytes(kind, native.BLOCK, inputs)
    blocks = max(1, _CHUNK_WEIGHTS // (native.BLOCK * inputs))
    for first in range(0, channels, blocks * native.BLOCK):
        part_NK = weight_NK.detach()[first : first + blocks * native.BLOCK].float().contiguous()
        address = to + first // native.BLOCK * stride * block_bytes
        library.omnidraft_pack(kind, part_NK.data_ptr(), *part_NK.shape, address, stride, offset)
        throttle.rest()


def memory(size: int) -> mmap.mmap:
    """Allocate memory, in huge pages where the system has them, since every pass reads all weights."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def address_of(memory: mmap.mmap) -> int:
    """Return the address of memory that can be written."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
