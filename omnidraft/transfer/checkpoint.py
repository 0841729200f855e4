"""The file that a killed training goes on from: the trainer's tensors, the curve, and what the run is of."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from omnidraft.distill.resume_tensors import from_plain_tensor, plain_tensor
from omnidraft.errors import ConfigError, StorageError
from omnidraft.files import replaced_file

_RUN, _CURVE = "run", "curve"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The one checkpoint of a run."""

    file: Path
    run: Mapping[str, Any]
    """Plain data that decides what the run computes: models, texts and settings."""

    def save(self, tensors: Mapping[str, Tensor], curve: list[dict[str, Any]]) -> None:
        """Replace the file, all or nothing. Raises StorageError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replaced_file(self.file) as file:
                save_file({**tensors, _RUN: plain_tensor(self.run), _CURVE: plain_tensor(curve)}, file.name)
        except (OSError, SafetensorError) as exc:  # safetensors has its own error for a full disk
            raise StorageError(f"{self.file} cannot be written: {exc}; free space and start again") from exc

    def load(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]] | None:
        """Return the tensors and the curve; None where there is no file.

        Raises:
            ConfigError: the file is damaged, or of a run of other models, texts or settings.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not self.file.exists():
            return None
        try:
            tensors = load_file(self.file)
            run, curve = from_plain_tensor(tensors.pop(_RUN)), from_plain_tensor(tensors.pop(_CURVE))
        except (OSError, SafetensorError, KeyError, ValueError) as exc:
            raise ConfigError(f"{self.file} is no checkpoint of a transfer: {exc}; delete it to start again") from exc
        self._require_same(run)
        return tensors, curve

    def _require_same(self, run: Mapping[str, Any]) -> None:
        differing = sorted(name for name in run.keys() | self.run.keys() if run.get(name) != self.run.get(name))
        if differing:
            name = differing[0]
            raise ConfigError(
                f"{self.file} is of another run: {name} was {run.get(name)}, is {self.run.get(name)}; go on with what "
                "it was, or delete the file to start again"
            )
