"""The compiled kernels that a wheel carries for every instruction set, so that an installation needs no compiler."""

import hashlib
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from omnidraft.models.native.build import (
    FLAGS,
    SOURCE,
    VARIANTS,
    compile_library,
    compiled,
    find_compiler,
    is_usable,
    source_digest,
)

FOLDER = Path(__file__).parent / "libraries"
"""Where a wheel has its libraries; a checkout has no such folder."""
_STANDALONE = ("-static-libstdc++", "-s")
"""Flags of these libraries alone: they ask for no C++ runtime, only for an old glibc and torch's libgomp."""
_GLIBC_VERSION = re.compile(rb"GLIBC_2\.(\d+)")
"""The versions of its symbols that a library asks for, as they stand in its string table."""


def kernel_library(variant: str, folder: Path) -> Path:
    """Return the library of this variant: the wheel's, or else one that is compiled into `folder`.

    Raises:
        KernelsUnavailable: see build.compiled.
    """
    if is_in_wheel(variant):
        return FOLDER / library_name(variant)
    return compiled(SOURCE, folder, VARIANTS[variant])


def is_in_wheel(variant: str) -> bool:
    """Return whether the wheel has this variant, of this very source, and nobody else could have written it."""
    return is_usable(FOLDER / library_name(variant))


def compile_for_wheel(folder: Path) -> list[Path]:
    """Compile all variants into `folder`. Raises KernelsUnavailable."""
    compiler, libraries = find_compiler(), [folder / library_name(variant) for variant in VARIANTS]
    for flags, library in zip(VARIANTS.values(), libraries, strict=True):
        compile_library(SOURCE, library, compiler, (*flags, *_STANDALONE))
    return libraries


def platform_tag(libraries: Iterable[Path]) -> str:
    """Return the tag of the oldest glibc that has every symbol which the libraries ask for.

    What else they need, libgomp.so.1, is no part of manylinux: torch, without which nothing here runs, brings it.
    """
    minors = [int(minor) for library in libraries for minor in _GLIBC_VERSION.findall(library.read_bytes())]
    system = f"manylinux_2_{max(minors)}" if minors else "linux"
    return f"{system}_{platform.machine()}"


def library_name(variant: str) -> str:
    """Return the file name of a variant; another source or other flags give another name."""
    parts = (source_digest(), *FLAGS, *VARIANTS[variant], *_STANDALONE)
    return f"{variant}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}.so"
