"""The target as a transformers model: it scores trees, keeps accepted nodes, and has reproducible padded passes.

Reproducible mode: every pass is a batch of `chains` rows of `width` ids that reads all `capacity` slots; prefill runs
in chunks of one size from position 0. Then no bit of a logit depends on the draft (algorithms.md, section 3), which
`self_test` verifies here. Several texts are computed one after another.
Fast mode: passes hold the trees of all texts, and read the slots in use.
Shapes: B rows of a batch, S ids of a row, C slots, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from omnidraft.errors import ModeRefused, model_errors
from omnidraft.models import precision as precisions
from omnidraft.models.hf import attention
from omnidraft.models.hf.attention import share_key_heads, tell_long_texts_apart
from omnidraft.models.hf.chain_target import ChainTarget
from omnidraft.models.hf.kv_slots import KvSlots
from omnidraft.models.hf.packed_session import PackedPasses, PackedSession
from omnidraft.models.hf.padded_session import PaddedSession, PassShape
from omnidraft.models.hf.pretrained import causal_lm
from omnidraft.models.native import library as native
from omnidraft.models.native.packed_cache import PackedCache
from omnidraft.models.native.target import NativeTarget
from omnidraft.models.native.weights import unsupported_reason
from omnidraft.models.probe import choice
from omnidraft.models.serial_passes import forward_serially, require_new, require_valid_pass
from omnidraft.models.target_checks import SelfTests, is_deterministic
from omnidraft.ports import DraftTree, Mode, Target, TargetSession, TreeLimits, ids_needed, rotation_offset

_MAX_NODES = 64
_MAX_ROWS, _MAX_ROWS_ON_ACCELERATOR = 64, 512


class TransformersTarget:
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
        self._model = model.eval()
        share_key_heads(model)
        tell_long_texts_apart(model)
        self._shape = shape = shape or PassShape()
        self._attention = attention.AttentionMasks(model)
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.first_context, self.context_limit = attention.first_context(config), attention.context_limit(config)
        self._num_layers: int = config.num_hidden_layers
        passes = f"b{shape.chains}-w{shape.width}-p{shape.prefill_rows}-c{shape.capacity_step}"
        self.fingerprint = fingerprint(model, passes, name, precision, kernels)
        self.max_rows = _MAX_ROWS if model.device.type == "cpu" else _MAX_ROWS_ON_ACCELERATOR
        self._self_tests = SelfTests()
        self._passes = PackedPasses(model, self._attention)

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        if mode == "fast":
            return TreeLimits(_MAX_NODES)
        chains, depth = self._shape.chains, self._shape.width - 1
        return TreeLimits(chains * depth, num_chains=chains, depth=depth)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> TargetSession:
        """See ports.Target. Raises ModeRefused when reproducible mode does not hold on this machine."""
        offset = rotation_offset(self, ids_needed(prompt_ids, max_new_tokens, self.context_limit))
        if mode == "reproducible":
            self._require_determinism(self._padded_capacity(len(prompt_ids)))
            return self._padded_session(self._padded_capacity(1), prompt_ids[:-1], self._require_determinism, offset)
        slots = KvSlots(self._num_layers, self._capacity(len(prompt_ids)), rotation_offset=offset)
        limits, step = self.limits(mode), self._shape.capacity_step
        return PackedSession(self._model, self._attention, limits, slots, prompt_ids[:-1], capacity_step=step)

    def _padded_session(
        self,
        capacity: int,
        prompt_ids: Sequence[int] = (),
        require: Callable[[int], None] = lambda capacity: None,
        offset: int = 0,
    ) -> PaddedSession:
        slots = KvSlots(self._num_layers, capacity, num_rows=self._shape.chains, rotation_offset=offset)
        return PaddedSession(self.compute, self._shape, self.limits("reproducible"), slots, prompt_ids, require)

    def forward(
        self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor]:
        """See ports.Target; the sessions are this target's. Texts in reproducible mode are computed one by one."""
        require_valid_pass(trees, prompts)
        logits: dict[int, torch.Tensor] = {}
        for kind, compute in ((PackedSession, self._forward_packed), (PaddedSession, forward_serially)):
            scored: list[Any] = [each for each in trees if isinstance(each[0], kind)]
            read: list[Any] = [each for each in prompts if isinstance(each[0], kind)]
            logits |= zip([id(session) for session, _ in scored], compute(scored, read), strict=True)
        return [logits[id(session)] for session, _ in trees]

    def _forward_packed(
        self, trees: Sequence[tuple[PackedSession, DraftTree]], prompts: Sequence[tuple[PackedSession, int]]
    ) -> list[torch.Tensor]:
        rows = [session.scored_rows(tree) for session, tree in trees]
        rows += [session.prompt_rows(num_ids) for session, num_ids in prompts]
        outputs = self._passes.forward(rows)
        for session, num_ids in prompts:
            session.num_kept += num_ids
        return [output.logits_RV for output in outputs[: len(trees)]]

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        """See ports.Target; the sessions are this target's."""
        require_new(session)
        if source.slots.rotation_offset != session.slots.rotation_offset:
            return 0
        num_same = min(num_ids, source.num_kept, session.num_unread)
        if isinstance(session, PaddedSession):
            num_same = session.reusable(source, num_same) if isinstance(source, PaddedSession) else 0
        if num_same:
            session.copy_keys(source.slots, num_same)
        return num_same

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target."""
        if mode == "reproducible":
            return self._padded_capacity(num_ids) * self._shape.chains * self._passes.bytes_of_slot
        return self._capacity(num_ids) * self._passes.bytes_of_slot

    def _require_determinism(self, capacity: int) -> None:
        self._self_tests.require(capacity, partial(self.self_test, capacity))

    def self_test(self, capacity: int) -> None:
        """Compare full passes with one id at a time, bit by bit.

        Raises:
            ModeRefused: some bit differs, so reproducible mode cannot be promised here.
        """
        chains, width = self._shape.chains, self._shape.width
        alone, blocks = (self._padded_session(capacity) for _ in range(2))
        if not is_deterministic(alone, blocks, vocab_size=self.vocab_size, chains=chains, width=width):
            raise ModeRefused(
                f"reproducible mode does not hold for this model, precision and machine (chains {chains}, width "
                f"{width}, capacity {capacity})",
                "set decode.mode = 'fast'",
            )

    def _capacity(self, needed: int) -> int:
        """Return the slots for `needed` ids, a padded pass and a padded prefill chunk, in whole steps."""
        step = self._shape.capacity_step
        return -(-(needed + max(self._shape.width, self._shape.prefill_rows)) // step) * step

    def _padded_capacity(self, num_ids: int) -> int:
        """Return the slots of a padded session with so many ids, which double from the fewest on."""
        capacity = self._capacity(1)
        while capacity < self._capacity(num_ids):
            capacity *= 2
        return capacity

    @torch.inference_mode()
    def compute(
        self,
        slots: KvSlots,
        ids_BS: Sequence[Sequence[int]],
        positions_S: torch.Tensor,
        sees_SC: torch.Tensor,
        num_logits: int,
    ) -> torch.Tensor:
        """Return the logits [B, num_logits, V] of the first ids of each row; keys go to the range of `slots`."""
        device = self._model.device
        positions_S, sees_SC = positions_S.to(device), sees_SC.to(device)
        positions_1S = positions_S[None].clamp(max=self.context_limit - 1)  # only padding can be beyond it
        with _experts_by_row(self._model):
            output = self._model(
                input_ids=torch.tensor(ids_BS, device=device),
                position_ids=positions_1S + slots.rotation_offset,
                attention_mask=self._attention.masks(sees_SC, positions_S, slots.start),
                past_key_values=slots,
                use_cache=True,
                logits_to_keep=torch.arange(num_logits, device=device),
            )
        logits_BSV: torch.Tensor = output.logits
        return logits_BSV


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
