"""One model in one number format, whose passes are timed in a process of its own.

`python -m pipelines.bench.kernels.engine SPEC` first writes a line about the engine, or {"error": reason}. Then
each line that it reads is a JSON object: {"pass": N}, a pass of N rows with the logits of all, or {"prompt": N}, a
prompt of N tokens. The answer is {"seconds": S}. It ends with its input.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch

from omnidraft.errors import ModelError, OmnidraftError
from omnidraft.models import precision
from omnidraft.models.catalog import store
from omnidraft.models.hf.target import load_model
from omnidraft.models.kv_session import PassSegment
from omnidraft.models.native import library
from omnidraft.models.native.model import NativeModel
from omnidraft.models.native.weights import ModelParts, unsupported_reason
from omnidraft.system import usable_processors

MAX_ROWS = 64
"""Maximum number of rows of a pass with logits."""
_MAX_TOKENS = 2048
_MATRICES, _EXPERTS = {*library.MATRICES, "head", "input_projection"}, {"expert_gate_up", "expert_down"}
"""The parts of our kernels' models that every pass reads whole; those of which a row reads its experts."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Names an engine."""

    system: str
    format: str
    """Number format of the weights."""
    variant: str
    """A build or a setting of the system."""
    model: str

    def __str__(self) -> str:
        return f"{self.system} {self.format} {self.variant}"

    def plain_data(self) -> dict[str, Any]:
        """Return the fields of a row."""
        return {name: value for name, value in asdict(self).items() if name != "model"}


@dataclass(frozen=True, slots=True)
class TimedEngine:
    """A loaded model, which reads ids as the whole of a text."""

    weight_bytes: int
    """Memory of the matrices that a pass over one row reads: all but the embedding and the experts of other rows."""
    vocab_size: int
    score: Callable[[list[int]], object]
    """Computes the logits after each id; at most MAX_ROWS ids."""
    read: Callable[[list[int]], object]
    """Computes at most the logits after the last id."""

    def answer(self, command: dict[str, int]) -> dict[str, float]:
        """Return the seconds of a pass or of a prompt, over ids of no meaning."""
        ((name, num_rows),) = command.items()
        ids = [(7 * row + 3) % self.vocab_size for row in range(num_rows)]
        started = time.perf_counter()
        {"pass": self.score, "prompt": self.read}[name](ids)
        return {"seconds": time.perf_counter() - started}


def load(spec: EngineSpec) -> TimedEngine:
    """Load the model. Raises ModelError when the system does not compute it, or not in this format, or not here."""
    return {"omnidraft": _native, "torch": _torch}[spec.system](spec)


def _native(spec: EngineSpec) -> TimedEngine:
    kernels = library.load(spec.variant)
    model = load_model(store.resolve(spec.model))
    if reason := unsupported_reason(model):
        raise ModelError(f"our kernels do not compute {spec.model}: {reason}")
    native = NativeModel(model, spec.format, kernels)
    backend = native.open(_MAX_TOKENS)
    return TimedEngine(
        _read_bytes(ModelParts(model, spec.format, kernels)),
        native.vocab_size,
        score=lambda ids: native.forward([PassSegment(backend, 0, range(-1, len(ids) - 1), ids, len(ids))]),
        read=lambda ids: native.forward([PassSegment(backend, 0, None, ids, 1)]),
    )


def _read_bytes(model: ModelParts) -> int:
    of_matrices, of_experts = (
        sum(part.num_bytes for part in model.parts if part.name.split(".")[-1] in names)
        for names in (_MATRICES, _EXPERTS)
    )
    return of_matrices + of_experts * model.sizes.experts_per_row // max(model.sizes.num_experts, 1)


def _torch(spec: EngineSpec) -> TimedEngine:
    model: Any = precision.apply(load_model(store.resolve(spec.model)), spec.format)

    @torch.inference_mode()
    def compute(ids: list[int], num_logits: int) -> object:
        return model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=num_logits)

    return TimedEngine(
        sum(module.weight.nbytes for module in model.modules() if isinstance(module, torch.nn.Linear)),
        model.config.vocab_size,
        score=lambda ids: compute(ids, 0),
        read=lambda ids: compute(ids, 1),
    )


def main(spec: EngineSpec) -> None:
    """Load the engine, which computes on no more threads than can run at once, then answer commands."""
    output = _take_stdout()
    if (usable := usable_processors()) < torch.get_num_threads():
        torch.set_num_threads(usable)
    try:
        engine = load(spec)
    except OmnidraftError as exc:
        print(json.dumps({"error": str(exc)}), file=output, flush=True)
        return
    facts = {"weight_bytes": engine.weight_bytes, "threads": torch.get_num_threads()}
    print(json.dumps(facts), file=output, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.answer(json.loads(line))), file=output, flush=True)


def _take_stdout() -> TextIO:
    """Return standard output for the answers; whatever else is printed goes to standard error from now on."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


if __name__ == "__main__":
    main(EngineSpec(**json.loads(sys.argv[1])))
