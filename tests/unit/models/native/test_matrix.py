"""Memory for packed weights is there whether or not the system has huge pages."""

import errno
import mmap
import os

import pytest

from omnidraft.models.native.matrix import address_of, memory


class WithoutHugePages(mmap.mmap):
    """Memory of a Linux kernel that was built without transparent huge pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_memory_needs_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    block = memory(1 << 16)
    assert isinstance(block, WithoutHugePages)
    assert len(block) == 1 << 16
    assert address_of(block)
