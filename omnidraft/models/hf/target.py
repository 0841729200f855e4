"""The target as a transformers model: it scores trees, keeps accepted nodes, and has reproducible padded passes.

Reproducible mode: every pass is a chain of `width` ids that reads all `capacity` slots; prefill runs in chunks of one
size from position 0. Then no bit of a logit depends on the draft (algorithms.md, section 3), which
`self_test` verifies here. Several texts are computed one after another.
Fast mode: passes hold the trees of all texts, and read the slots in use.
Shapes: S ids of a pass, C slots, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from omnidraft.errors import model_errors
from omnidraft.models import precision as precisions
from omnidraft.models.hf import attention
from omnidraft.models.hf.chain_target import ChainTarget
from omnidraft.models.hf.kv_slots import KvSlots
from omnidraft.models.hf.padded_session import PaddedSession, PassShape
from omnidraft.models.hf.pretrained import causal_lm
from omnidraft.models.hf.slot_model import SlotModel
from omnidraft.models.kv_session import KvSession
from omnidraft.models.native import library as native
from omnidraft.models.native.packed_cache import PackedCache
from omnidraft.models.native.target import NativeTarget
from omnidraft.models.native.weights import unsupported_reason
from omnidraft.models.probe import choice
from omnidraft.models.text_session import TextSession
from omnidraft.models.text_target import TextTarget
from omnidraft.ports import Mode, Target, TreeLimits, ids_needed, rotation_offset

_MAX_NODES = 64
_MAX_ROWS, _MAX_ROWS_ON_ACCELERATOR = 64, 512


class TransformersTarget(TextTarget):
    """Implements ports.Target. One pass at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        shape: PassShape | None = None,
        *,
        name: str,
        precision: str,
        kernels: str = "auto",
    ) -> None:
        """
        Args:
            shape: that of passes in reproducible mode; None takes the usual one.
            kernels: the build of our kernels that its matrices are packed for, where `precision` has them packed.
        """
        self._slots = own = SlotModel(model)
        self._model = model
        self._shape = shape = shape or PassShape()
        self._tested_width = shape.width
        passes = f"w{shape.width}-p{shape.prefill_rows}-c{shape.capacity_step}"
        named = fingerprint(model, passes, name, precision, kernels)
        super().__init__(own.vocab_size, own.context_limit, named, first_context=own.first_context)
        self.max_rows = _MAX_ROWS if model.device.type == "cpu" else _MAX_ROWS_ON_ACCELERATOR

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        if mode == "fast":
            return TreeLimits(_MAX_NODES)
        depth = self._shape.width - 1
        return TreeLimits(depth, num_chains=1, depth=depth)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> TextSession:
        """See ports.Target."""
        offset = rotation_offset(self, ids_needed(prompt_ids, max_new_tokens, self.context_limit))
        if mode == "fast":
            return KvSession(self._slots, prompt_ids[:-1], self.limits(mode), len(prompt_ids), offset)
        self.require_self_test(self._padded_capacity(len(prompt_ids)))
        return self._padded_session(self._padded_capacity(1), prompt_ids[:-1], self.require_self_test, offset)

    def _padded_session(
        self, capacity: int, prompt_ids: Sequence[int], require: Callable[[int], None], offset: int = 0
    ) -> PaddedSession:
        slots = KvSlots(self._slots.num_layers, capacity, rotation_offset=offset)
        return PaddedSession(self.compute, self._shape, slots, prompt_ids, self.limits("reproducible"), require)

    def _tested_session(self, num_slots: int) -> PaddedSession:
        return self._padded_session(num_slots, (), lambda capacity: None)

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target."""
        if mode == "fast":
            return self._slots.kv_bytes(num_ids)
        return self._padded_capacity(num_ids) * self._slots.bytes_of_slot

    def _padded_capacity(self, num_ids: int) -> int:
        """Return the slots for so many ids and a padded pass behind them, which double from the fewest on."""
        capacity, needed = self._shape.capacity_step, num_ids + max(self._shape.width, self._shape.prefill_rows)
        while capacity < needed:
            capacity *= 2
        return capacity

    @torch.inference_mode()
    def compute(
        self,
        slots: KvSlots,
        ids_S: Sequence[int],
        positions_S: torch.Tensor,
        sees_SC: torch.Tensor,
        num_logits: int,
    ) -> torch.Tensor:
        """Return the logits [num_logits, V] of the first ids; keys go to the range of `slots`."""
        device = self._model.device
        positions_S, sees_SC = positions_S.to(device), sees_SC.to(device)
        positions_1S = positions_S[None].clamp(max=self.context_limit - 1)  # only padding can be beyond it
        with _experts_by_row(self._model):
            output = self._model(
                input_ids=torch.tensor([ids_S], device=device),
                position_ids=positions_1S + slots.rotation_offset,
                attention_mask=self._slots.attention.masks(sees_SC, positions_S, slots.start, len(positions_S)),
                past_key_values=slots,
                use_cache=True,
                logits_to_keep=torch.arange(num_logits, device=device),
            )
        logits_SV: torch.Tensor = output.logits[0]
        return logits_SV


def transformers_target(model: PreTrainedModel, *, name: str, precision: str, kernels: str = "auto") -> Target:
    """Return the target of a model that transformers runs. Raises ModelError where its passes do not continue texts."""
    if attention.takes_chains_only(model):
        return ChainTarget(model, fingerprint=fingerprint(model, "chains", name, precision, kernels))
    return TransformersTarget(model, name=name, precision=precision, kernels=kernels)


def fingerprint(model: PreTrainedModel, passes: str, name: str, precision: str, kernels: str) -> str:
    """Return what identifies a target with passes of this kind; see ports.Target."""
    parts = (name, precision, _device(model.device), passes, f"t{torch.get_num_threads()}", f"torch{torch.__version__}")
    return "-".join((*parts, _arithmetic(precision, kernels)))


def load_target(
    folder: Path,
    *,
    name: str,
    precision: str,
    kernels: str = "auto",
    cache: PackedCache | None = None,
) -> Target:
    """Load a model folder; our own kernels run the whole model if they support it, else its matrices.

    Args:
        cache: keeps the packed weights for the next start; see native.target.cached_target. None keeps nothing.

    Raises:
        ModelError: it is not one transformers can run as a causal language model, or there is no compiler for `int8`.
    """
    chosen = precisions.automatic(kernels) if precision == "auto" else precision
    state = cache.state(folder, chosen) if cache else None
    model = load_model(folder)
    precisions.warn_of_rounding(model, chosen, name)
    if chosen in native.PACKED and unsupported_reason(model) is None:
        packed = cache.packed(folder, state, model, chosen, native.load(kernels)) if cache else model
        return NativeTarget(packed, name=name, precision=chosen, kernels=kernels)
    with model_errors(f"the model in {folder} cannot be computed in {chosen}"):
        changed = precisions.apply(model, chosen, kernels)
        return transformers_target(changed, name=name, precision=chosen, kernels=kernels)  # type: ignore[arg-type]


@contextmanager
def _experts_by_row(model: PreTrainedModel) -> Iterator[None]:
    """Let each row meet its experts alone: together with others, how it is rounded depends on them."""
    if not model._can_set_experts_implementation():
        with _RowsApart() if any("Expert" in type(each).__name__ for each in model.modules()) else nullcontext():
            yield
        return
    config: Any = model.config.get_text_config()
    before, config._experts_implementation = config._experts_implementation, "batched_mm"
    yield
    config._experts_implementation = before


class _RowsApart(TorchFunctionMode):
    """Multiplies one by one the rows [R, K] that a model's own code collects for each expert."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.nn.functional.linear, torch.Tensor.matmul) and args[0].dim() == 2:
            return torch.cat([function(row, *args[1:], **kwargs or {}) for row in args[0].split(1)])
        return function(*args, **kwargs or {})


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _arithmetic(precision: str, kernels: str) -> str:
    """Return the names on which bits depend: torch's instructions, oneDNN's limit of them, and our kernels."""
    ours = native.bits(native.load(kernels), precision) if precision in native.PACKED else None
    names = (torch.backends.cpu.get_cpu_capability(), choice.torch_products().isa, ours)
    return "-".join(name for name in names if name)


def load_model(folder: Path) -> PreTrainedModel:
    """Load a causal language model without gradients, with its weights unchanged. Raises ModelError."""
    choice.torch_products()
    return causal_lm(folder, dtype="auto").requires_grad_(False)
