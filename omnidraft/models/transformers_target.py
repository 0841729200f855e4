"""The target as a transformers model: scores trees, keeps what was accepted, and, padded, gives the same bits always.

Reproducible mode: every pass has `width` rows and reads all `capacity` slots, prefill runs in chunks of one size from
position 0. Then no bit of a logit depends on what was drafted (algorithms.md section 3); `self_test` proves it here.
Fast mode: passes are as wide as the tree and read the slots in use.
Shapes: N nodes of the tree, S rows of a pass, C slots, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from omnidraft.config import DecodeSettings
from omnidraft.errors import ConfigError, ContractError, ModelError, RequestError
from omnidraft.models import attention
from omnidraft.models import precision as precisions
from omnidraft.models.kv_slots import KvSlots
from omnidraft.ports import DraftTree, Mode, TreeLimits

_MAX_NODES = 64


class TransformersTarget:
    """Implements ports.Target. One pass at a time."""

    def __init__(self, model: PreTrainedModel, settings: DecodeSettings, *, name: str, precision: str) -> None:
        self._model = model.eval()
        self._settings = settings
        self._attention = attention.Attention(model)
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context_limit: int = config.max_position_embeddings
        self._num_layers: int = config.num_hidden_layers
        self._has_moving_rope = attention.has_moving_rope(config)
        self.fingerprint = (
            f"{name}-{precision}-w{settings.width}-p{settings.prefill_rows}-c{settings.capacity_step}"
            f"-t{torch.get_num_threads()}-torch{torch.__version__}"
        )
        self._proved: set[int] = set()

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        return TreeLimits(self._settings.width - 1, num_chains=1) if mode == "reproducible" else TreeLimits(_MAX_NODES)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "_Session":
        """See ports.Target. Raises ConfigError when reproducible mode does not hold on this machine."""
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        needed = len(prompt_ids) + max_new_tokens
        if needed > self.context_limit:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and {max_new_tokens} more were asked for, but the target's "
                f"context holds {self.context_limit}; shorten the prompt or lower max_new_tokens"
            )
        capacity = self._capacity(needed)
        if mode == "reproducible" and capacity not in self._proved:
            self._prove(capacity)
        session = _Session(self, capacity, mode)
        session.prefill(list(prompt_ids[:-1]))
        return session

    def _prove(self, capacity: int) -> None:
        if self._has_moving_rope:
            raise ConfigError("this model's rope depends on the length of the text: set decode.mode = 'fast'")
        self.self_test(capacity)
        self._proved.add(capacity)

    def self_test(self, capacity: int) -> None:
        """Compare full blocks, begun at every offset, against one row at a time, bit by bit.

        Raises:
            ConfigError: some bit differs, so reproducible mode cannot be promised here.
        """
        width = self._settings.width
        ids = [(7 * i + 3) % self.vocab_size for i in range(2 * width)]
        alone, blocks = (_Session(self, capacity, "reproducible") for _ in range(2))
        alone_NV = [alone.extend(token) for token in ids]
        for start in range(width):
            rows = ids[start : start + width]
            block = DraftTree(tuple(rows), (0, *range(width - 1)), (None,) * width, (0.0,) * width)
            if not torch.equal(blocks.score(block), torch.stack(alone_NV[start : start + width])):
                raise ConfigError(
                    f"reproducible mode does not hold for this model, precision and machine (width {width}, "
                    f"capacity {capacity}): set decode.mode = 'fast', or another decode.width"
                )
            blocks.keep((0,))

    def _capacity(self, needed: int) -> int:
        """Slots for `needed` ids, a padded pass and a padded prefill chunk behind them, in whole steps."""
        step = self._settings.capacity_step
        return -(-(needed + max(self._settings.width, self._settings.prefill_rows)) // step) * step

    @torch.inference_mode()
    def forward(
        self, slots: KvSlots, ids: list[int], positions_S: torch.Tensor, sees_SC: torch.Tensor, num_logits: int
    ) -> torch.Tensor:
        """Logits float32 [num_logits, V] of the first rows; keys go where `slots` was placed."""
        device = self._model.device
        positions_S, sees_SC = positions_S.to(device), sees_SC.to(device)
        rows = torch.arange(num_logits, device=device)
        output = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=positions_S[None].clamp(max=self.context_limit - 1),  # only padding can lie beyond
            attention_mask=self._attention.masks(sees_SC, positions_S, slots.start),
            past_key_values=slots,
            use_cache=True,
            logits_to_keep=rows,
        )
        return output.logits[0].float()


class _Session:
    """Implements ports.TargetSession."""

    def __init__(self, target: TransformersTarget, capacity: int, mode: Mode) -> None:
        self._target = target
        self._settings = target._settings
        self._mode: Mode = mode
        self._is_padded = mode == "reproducible"
        self._slots = KvSlots(target._num_layers, capacity)
        self._num_kept = 0

    def prefill(self, ids: list[int]) -> None:
        """Keys for these ids, in chunks; in reproducible mode padded to one size."""
        rows = self._settings.prefill_rows if self._is_padded else max(len(ids), 1)
        for start in range(0, len(ids), rows):
            chunk = ids[start : start + rows]
            self._pass(chunk, None, rows if self._is_padded else len(chunk), num_logits=0)
            self._num_kept += len(chunk)

    def extend(self, token: int) -> torch.Tensor:
        """Score one id by itself and keep it. [V]"""
        logits_NV = self.score(DraftTree.empty(token))
        self.keep((0,))
        return logits_NV[0]

    def score(self, tree: DraftTree) -> torch.Tensor:
        num_nodes = len(tree)
        if not tree.fits(limits := self._target.limits(self._mode)):
            raise ContractError(f"a tree of {num_nodes - 1} drafted nodes does not fit {limits} ({self._mode} mode)")
        rows = self._settings.width if self._is_padded else num_nodes
        return self._pass(list(tree.tokens), None if tree.is_chain else tree.parents, rows, num_logits=num_nodes)

    def keep(self, nodes: Sequence[int]) -> None:
        self._slots.gather([self._num_kept + node for node in nodes], self._num_kept)
        self._num_kept += len(nodes)

    def close(self) -> None:
        self._slots = KvSlots(0, 0)

    def _pass(self, ids: list[int], parents: Sequence[int] | None, rows: int, num_logits: int) -> torch.Tensor:
        """Logits of the first rows. No parents: a chain, which padding rows continue, to look like any other row."""
        start, padding = self._num_kept, rows - len(ids)
        visible = self._slots.capacity if self._is_padded else start + rows
        if parents is None:
            positions_S, sees_SC = attention.chain(start, rows, visible)
        else:
            positions_S, sees_SC = attention.tree(parents, start)
        self._slots.place(start, visible)
        num_read = rows if self._is_padded and num_logits else num_logits  # the head's matrix product has one width too
        logits = self._target.forward(self._slots, ids + [0] * padding, positions_S, sees_SC, num_read)
        return logits[:num_logits]


def load_target(folder: Path, settings: DecodeSettings, *, name: str, precision: str) -> TransformersTarget:
    """Read a model folder. Raises ModelError when it is not one transformers can run as a causal language model."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    chosen = precisions.automatic() if precision == "auto" else precision
    model = load_model(folder, chosen)
    return TransformersTarget(model, settings, name=name, precision=chosen)


def load_model(folder: Path, precision: str) -> PreTrainedModel:
    """A causal language model without gradients, computing in `precision`."""
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype="auto", attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{folder} is not a model folder that transformers can load: {exc}") from exc
    model.requires_grad_(False)
    if torch.cuda.is_available() and precision in ("float32", "bfloat16"):
        model.to("cuda")  # type: ignore[arg-type]
    applied: PreTrainedModel = precisions.apply(model, precision)  # type: ignore[assignment]
    return applied
