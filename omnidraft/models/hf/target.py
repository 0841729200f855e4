"""The target as a transformers model: it scores trees, keeps accepted nodes, and has reproducible padded passes.

Reproducible mode: every pass is a batch of `chains` rows of `width` ids that reads all `capacity` slots; prefill runs
in chunks of one size from position 0. Then no bit of a logit depends on the draft (algorithms.md, section 3), which
`self_test` verifies here. A tree is laid out as chains, and after the pass all rows get the keys of the path's row.
Fast mode: passes are as wide as the tree and read the slots in use.
Shapes: N nodes of the tree, B rows of a batch, S ids of a row, C slots, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from omnidraft.config import DecodeSettings
from omnidraft.errors import ConfigError, ContractError, ModelError
from omnidraft.models import precision as precisions
from omnidraft.models.hf import attention
from omnidraft.models.hf.kv_slots import KvSlots, kv_bytes_of_slot
from omnidraft.models.hf.tree_layout import ChainLayout, chain_visibility, lay_out, pad, tree_visibility
from omnidraft.models.native import library as native
from omnidraft.models.native.target import LlamaTarget
from omnidraft.models.native.weights import is_supported
from omnidraft.models.probe import choice
from omnidraft.models.serial_passes import forward_serially, require_new
from omnidraft.models.target_checks import ids_needed, is_deterministic
from omnidraft.ports import DraftTree, Mode, Target, TreeLimits

_MAX_NODES = 64
_MAX_ROWS, _MAX_ROWS_ON_ACCELERATOR = 64, 512


class TransformersTarget:
    """Implements ports.Target. One pass at a time."""

    def __init__(self, model: PreTrainedModel, settings: DecodeSettings, *, name: str, precision: str) -> None:
        self._model = model.eval()
        attention.share_key_heads(model)
        self._settings = settings
        self._attention = attention.AttentionMasks(model)
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context_limit: int = config.max_position_embeddings
        self._num_layers: int = config.num_hidden_layers
        self._bytes_of_slot = settings.chains * kv_bytes_of_slot(config, model.dtype)
        self._has_length_dependent_rope = attention.has_length_dependent_rope(config)
        self.fingerprint = (
            f"{name}-{precision}-b{settings.chains}-w{settings.width}-p{settings.prefill_rows}-c{settings.capacity_step}"
            f"-t{torch.get_num_threads()}-torch{torch.__version__}{_isa_suffix()}"
        )
        self.max_rows = _MAX_ROWS if model.device.type == "cpu" else _MAX_ROWS_ON_ACCELERATOR
        self._verified_capacities: set[int] = set()

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        if mode == "fast":
            return TreeLimits(_MAX_NODES)
        chains, depth = self._settings.chains, self._settings.width - 1
        return TreeLimits(chains * depth, num_chains=chains, depth=depth)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "_Session":
        """See ports.Target. Raises ConfigError when reproducible mode does not hold on this machine."""
        needed = ids_needed(prompt_ids, max_new_tokens, self.context_limit)
        capacity = self._capacity(needed)
        if mode == "reproducible" and capacity not in self._verified_capacities:
            self._verify_determinism(capacity)
        return _Session(self, capacity, mode, prompt_ids[:-1])

    def forward(
        self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor]:
        """See ports.Target; the sessions are this target's."""
        return forward_serially(trees, prompts)

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        """See ports.Target; the sessions are this target's."""
        require_new(session)
        return session.copy_keys(source, num_ids)

    def kv_bytes(self, num_ids: int) -> int:
        """See ports.Target."""
        return self._capacity(num_ids) * self._bytes_of_slot

    def _verify_determinism(self, capacity: int) -> None:
        if self._has_length_dependent_rope:
            raise ConfigError("this model's rope depends on the length of the text: set decode.mode = 'fast'")
        self.self_test(capacity)
        self._verified_capacities.add(capacity)

    def self_test(self, capacity: int) -> None:
        """Compare full passes with one id at a time, bit by bit.

        Raises:
            ConfigError: some bit differs, so reproducible mode cannot be promised here.
        """
        chains, width = self._settings.chains, self._settings.width
        alone, blocks = (_Session(self, capacity, "reproducible") for _ in range(2))
        if not is_deterministic(alone, blocks, vocab_size=self.vocab_size, chains=chains, width=width):
            raise ConfigError(
                f"reproducible mode does not hold for this model, precision and machine (chains {chains}, width "
                f"{width}, capacity {capacity}): set decode.mode = 'fast', or other decode.chains and decode.width"
            )

    def _capacity(self, needed: int) -> int:
        """Return the slots for `needed` ids, a padded pass and a padded prefill chunk, in whole steps."""
        step = self._settings.capacity_step
        return -(-(needed + max(self._settings.width, self._settings.prefill_rows)) // step) * step

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
        output = self._model(
            input_ids=torch.tensor(ids_BS, device=device),
            position_ids=positions_S[None].clamp(max=self.context_limit - 1),  # only padding can be beyond it
            attention_mask=self._attention.masks(sees_SC, positions_S, slots.start),
            past_key_values=slots,
            use_cache=True,
            logits_to_keep=torch.arange(num_logits, device=device),
        )
        logits_BSV: torch.Tensor = output.logits
        return logits_BSV


class _Session:
    """Implements ports.TargetSession."""

    def __init__(self, target: TransformersTarget, capacity: int, mode: Mode, prompt_ids: Sequence[int] = ()) -> None:
        self._target = target
        self._settings = target._settings
        self._mode: Mode = mode
        self._is_padded = mode == "reproducible"
        self._slots = KvSlots(target._num_layers, capacity, num_rows=self._settings.chains if self._is_padded else 1)
        self._chains: ChainLayout | None = None
        self._prompt_ids = tuple(prompt_ids)
        self._num_prefilled = 0
        """In reproducible mode the end of the last whole chunk, which is computed as soon as its first id is read."""
        self.num_kept = 0

    @property
    def num_unread(self) -> int:
        return max(len(self._prompt_ids) - self.num_kept, 0)

    def read(self, num_ids: int) -> None:
        """Compute the keys of so many unread prompt ids; in reproducible mode in padded chunks, once for all rows."""
        self.num_kept += num_ids
        rows = self._settings.prefill_rows if self._is_padded else num_ids
        while self._num_prefilled < self.num_kept:
            start = self._num_prefilled
            chunk = self._prompt_ids[start : start + rows]
            self._pass(start, [pad(chunk, rows)], None, num_logits=0)
            self._num_prefilled += len(chunk)

    def copy_keys(self, source: "_Session", num_ids: int) -> int:
        """Copy the keys of the first `num_ids` ids as far as this session would compute the same; return their number.
        In reproducible mode these are whole chunks that the source computed at the same capacity."""
        num_same = min(num_ids, source.num_kept, self.num_unread)
        if self._is_padded:
            if not source._is_padded or source._slots.capacity != self._slots.capacity:
                return 0
            rows = self._settings.prefill_rows
            num_same = min(num_same, len(source._prompt_ids)) // rows * rows
        if num_same:
            self._slots.copy(source._slots, num_same)
        self.num_kept = self._num_prefilled = num_same
        return num_same

    def score(self, tree: DraftTree) -> torch.Tensor:
        if not tree.fits(limits := self._target.limits(self._mode)):
            raise ContractError(f"a tree of {len(tree) - 1} drafted nodes does not fit {limits} ({self._mode} mode)")
        if self.num_unread:
            self.read(self.num_unread)
        if not self._is_padded:
            parents = None if tree.is_chain else tree.parents
            return self._pass(self.num_kept, [tree.tokens], parents, num_logits=len(tree))[0].float()
        width = self._settings.width
        self._chains = lay_out(tree, rows=self._settings.chains, width=width)
        # all columns are read, because the head's matrix product has one width too
        logits_BSV = self._pass(self.num_kept, self._chains.ids_BS, None, num_logits=width)
        return self._chains.node_logits(logits_BSV).float()

    def keep(self, nodes: Sequence[int]) -> None:
        if self._chains is None:
            self._slots.gather([self.num_kept + node for node in nodes], self.num_kept)
        else:
            self._slots.spread(self._chains.row_of(nodes), self.num_kept, len(nodes))
        self.num_kept += len(nodes)

    def close(self) -> None:
        self._slots = KvSlots(0, 0)

    def _pass(
        self, start: int, ids_BS: Sequence[Sequence[int]], parents: Sequence[int] | None, *, num_logits: int
    ) -> torch.Tensor:
        """Return the logits [B, num_logits, V] of ids that begin at slot `start`. Without parents the rows are chains,
        and padding ids continue them."""
        width = len(ids_BS[0])
        visible = self._slots.capacity if self._is_padded else start + width
        if parents is None:
            positions_S, sees_SC = chain_visibility(start, width, visible)
        else:
            positions_S, sees_SC = tree_visibility(parents, start)
        self._slots.set_range(start, visible)
        return self._target.compute(self._slots, ids_BS, positions_S, sees_SC, num_logits)


def load_target(folder: Path, settings: DecodeSettings, *, name: str, precision: str, kernels: str = "auto") -> Target:
    """Load a model folder; our own kernels run the whole model if they support it, else its matrices.

    Raises:
        ModelError: it is not one transformers can run as a causal language model, or there is no compiler for `int8`.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    chosen = precisions.automatic(kernels) if precision == "auto" else precision
    model = load_model(folder)
    if chosen in native.PACKED and is_supported(model):
        return LlamaTarget(model, name=name, precision=chosen, kernels=kernels)
    changed = precisions.apply(model, chosen, kernels)
    return TransformersTarget(changed, settings, name=name, precision=chosen)  # type: ignore[arg-type]


def _isa_suffix() -> str:
    """Return a name of oneDNN's instruction limit, on which bits depend."""
    isa = choice.torch_products().isa
    return f"-{isa}" if isa else ""


def load_model(folder: Path) -> PreTrainedModel:
    """Load a causal language model without gradients, with its weights unchanged."""
    choice.torch_products()
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype="auto",
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,  # never a pickle
        )
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{folder} is not a model folder that transformers can load: {exc}") from exc
    return model.requires_grad_(False)
