"""Write, verify and read snapshot folders; manifest.py describes their layout.

A folder is written under another name, with the checksums in the manifest and the manifest last, synced to disk, then
renamed: readers see all of a snapshot or none of it, even after a power failure.
Tensors are safetensors files, never pickle. torch is imported only where a tensor needs it.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from omnidraft.errors import SnapshotCorrupt, SnapshotError
from omnidraft.files import link_or_copy, sha256_of, whole_folder
from omnidraft.private_files import PRIVATE, USUAL, create
from omnidraft.snapshots.manifest import Manifest
from omnidraft.snapshots.signing import UNSIGNED, SnapshotSigning

if TYPE_CHECKING:
    import torch
import hashlib

MANIFEST = "manifest.json"
DRAFTER = "serving/drafter.safetensors"
NGRAMS = "serving/ngrams.safetensors"

Tensors = Mapping[str, "np.ndarray | torch.Tensor"]


def write(
    folder: Path, manifest: Manifest, parts: Mapping[str, Path | Tensors], *, signing: SnapshotSigning = UNSIGNED
) -> Manifest:
    """Write a snapshot folder and return its manifest with checksums, and with a signature if there is a key.

    Args:
        parts: relative name such as `serving/drafter.safetensors` -> a file, which is linked and must not change
            afterwards, or tensors by name.

    Raises:
        SnapshotError: the folder exists, or a name leaves it.
        StorageError: the disk is full, or the files cannot be written for another reason; nothing of them stays.
    """
    if folder.exists():
        raise SnapshotError(f"{folder} exists; a snapshot is written once and never changed")
    with whole_folder(folder, f"the snapshot {folder}", "; free space there") as partial:
        checksums = {name: _write_file(partial, name, content) for name, content in parts.items()}
        complete = signing.sign(manifest.model_copy(update={"sha256": checksums}))
        write_manifest(partial, complete)
    return complete


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace the manifest of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_text(manifest_text(manifest))


def manifest_text(manifest: Manifest) -> str:
    """Return the manifest as indented JSON."""
    return manifest.model_dump_json(indent=2) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        SnapshotCorrupt: there is none, it is not a manifest, or it names files outside the folder.
    """
    try:
        return parse_manifest((folder / MANIFEST).read_bytes())
    except OSError as exc:
        raise SnapshotCorrupt(f"{folder} has no readable {MANIFEST}, so it is not a whole snapshot") from exc


def parse_manifest(text: str | bytes) -> Manifest:
    """Parse a manifest. Raises SnapshotCorrupt when it is none, or names files outside the snapshot's folder."""
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as exc:
        problem = exc.errors()[0]
        raise SnapshotCorrupt(f"not a manifest: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from exc
    for name in manifest.sha256:
        _check_name(name)
    return manifest


def parts_of(manifest: Manifest, removed: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the parts (`serving`, `resume`) that have files in this snapshot, but for those that were removed."""
    return tuple(sorted({_part_of(name) for name in manifest.sha256}.difference(removed)))


def verify(folder: Path, parts: Sequence[str]) -> Manifest:
    """Check that these parts hold exactly the files of the manifest, byte for byte, and return the manifest.

    Raises:
        SnapshotCorrupt: a file is missing, differs, or is not listed.
    """
    manifest = read_manifest(folder)
    expected = {name for name in manifest.sha256 if _part_of(name) in parts}
    present = {name for part in parts for name in _files_below(folder, part)}
    if extra := sorted(present - expected):
        raise SnapshotCorrupt(f"{folder} holds {extra[0]}, which its manifest does not list")
    for name in sorted(expected):
        _check_file(folder, name, manifest.sha256[name])
    return manifest


def serving_tensors(folder: Path) -> dict[str, "torch.Tensor"] | None:
    """Return the drafter's tensors; None: it is the base drafter, unchanged. Raises SnapshotCorrupt."""
    return tensors(folder, DRAFTER) if (folder / DRAFTER).exists() else None


def ngrams(folder: Path) -> dict[str, np.ndarray]:
    """Return the packed arrays of the n-gram cache; empty if the snapshot has none. Raises SnapshotCorrupt."""
    from safetensors import SafetensorError, numpy

    if not (folder / NGRAMS).exists():
        return {}
    try:
        return numpy.load_file(folder / NGRAMS)
    except (SafetensorError, OSError) as exc:
        raise SnapshotCorrupt(f"{folder / NGRAMS} cannot be read: {exc}") from exc


def tensors(folder: Path, name: str) -> dict[str, "torch.Tensor"]:
    """Return the tensors of one file, for example `resume/optimizer.safetensors`. Raises SnapshotCorrupt."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_name(name)
    try:
        return load_file(folder / name)
    except (SafetensorError, OSError) as exc:
        raise SnapshotCorrupt(f"{folder / name} cannot be read: {exc}") from exc


def _part_of(name: str) -> str:
    return PurePosixPath(name).parts[0]


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    is_plain = path.as_posix() == name and not path.is_absolute() and ".." not in path.parts and "\\" not in name
    if not is_plain or len(path.parts) < 2:
        raise SnapshotCorrupt(f"{name!r} is not the name of a file in a part of the snapshot, such as serving/x")


def _files_below(folder: Path, part: str) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in (folder / part).rglob("*") if not path.is_dir()]


def _check_file(folder: Path, name: str, expected: str) -> None:
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise SnapshotCorrupt(f"{folder} lacks the file {name}")
    if (actual := sha256_of(path)) != expected:
        raise SnapshotCorrupt(f"{path} has sha256 {actual}, its manifest says {expected}")


def _write_file(folder: Path, name: str, content: Path | Tensors) -> str:
    _check_name(name)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, os.PathLike):
        link_or_copy(Path(content), path)
    else:
        rights = create(path, PRIVATE if is_private(name) else USUAL)
        _save_tensors(path, content)
        path.chmod(rights)  # safetensors may have made the file anew
    return sha256_of(path)


def _save_tensors(path: Path, named: Tensors) -> None:
    arrays = {name: np.ascontiguousarray(value) for name, value in named.items() if isinstance(value, np.ndarray)}
    if len(arrays) == len(named):
        from safetensors import numpy

        numpy.save_file(arrays, path)
        return
    import torch
    from safetensors.torch import save_file

    save_file({name: torch.as_tensor(value).detach().cpu().contiguous() for name, value in named.items()}, path)


MEMORY = "memory/"
RESUME = "resume/"
"""The part with users' records: held-out ones and those that are learned again."""
WORKER_PARTS = ("serving", "memory")
"""The parts that a worker reads."""
PRUNED_PARTS = ("resume", "memory")
"""The parts with users' text, which only the newest snapshots and the champion keep."""
ALL_PARTS = ("serving", *PRUNED_PARTS)
_PLAIN, _ENCRYPTED = ".safetensors", ".encrypted"
_HASH_CHARACTERS = 32


def setting_of(part: str) -> str:
    """Return the name of the setting that says how many snapshots keep this part."""
    return "registry.keep_serving" if part == "serving" else "registry.keep_resume"


def plain_name(kind: str, owner: str) -> str:
    """Return the name of a file that is not encrypted."""
    digest = hashlib.sha256(f"{kind}\n{owner}".encode()).hexdigest()
    return f"{kind}-{digest[:_HASH_CHARACTERS]}{_PLAIN}"


def encrypted_name(kind: str, key_id: str) -> str:
    """Return the name of a file that is encrypted with the key of this id."""
    return f"{kind}-{key_id}{_ENCRYPTED}"


def key_id_of(name: str) -> str | None:
    """Return the id of the key that a file of this name is encrypted with; None: it is plain."""
    return name.removesuffix(_ENCRYPTED).rpartition("-")[2] if name.endswith(_ENCRYPTED) else None


def is_private(name: str) -> bool:
    """Return whether a snapshot's file, by its relative name, has users' text that anybody could read."""
    return name.startswith(RESUME) or (name.startswith(MEMORY) and key_id_of(name) is None)
