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

from omnidraft.config import DecodeSettings
from omnidraft.errors import ConfigError, ModelError, RequestError
from omnidraft.models import precision as precisions
from omnidraft.models.kv_slots import KvSlots
from omnidraft.ports import DraftTree, Mode


class TransformersTarget:
    """Implements ports.Target. One pass at a time."""

    supports_trees = True

    def __init__(self, model: PreTrainedModel, settings: DecodeSettings, *, name: str, precision: str) -> None:
        self._model = model.eval()
        self._settings = settings
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context_limit: int = config.max_position_embeddings
        self._num_layers: int = config.num_hidden_layers
        self._window: int | None = _sliding_window(config)
        self.fingerprint = (
            f"{name}-{precision}-w{settings.width}-p{settings.prefill_rows}-c{settings.capacity_step}"
            f"-t{torch.get_num_threads()}-torch{torch.__version__}"
        )
        self._proved: set[int] = set()

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
            self.self_test(capacity)
        session = _Session(self, capacity, mode)
        session.prefill(list(prompt_ids[:-1]))
        return session

    def self_test(self, capacity: int) -> None:
        """Compare blocks of every length, in every row, against one row at a time, bit by bit.

        Raises:
            ConfigError: some bit differs, so reproducible mode cannot be promised here.
        """
        width = self._settings.width
        ids = [(7 * i + 3) % self.vocab_size for i in range(2 * width)]
        alone = _Session(self, capacity, "reproducible")
        alone_NV = []
        for token in ids:
            alone_NV.append(alone.score(DraftTree.empty(token))[0])
            alone.keep((0,))
        for start in range(width):
            block = _Session(self, capacity, "reproducible")
            for token in ids[:start]:
                block.score(DraftTree.empty(token))
                block.keep((0,))
            rows = ids[start : start + width]
            chain = DraftTree(tuple(rows), (0, *range(width - 1)), (None,) * width, (0.0,) * width)
            if not torch.equal(block.score(chain), torch.stack(alone_NV[start : start + width])):
                raise ConfigError(
                    f"reproducible mode does not hold for this model, precision and machine (width {width}, "
                    f"capacity {capacity}): set decode.mode = 'fast', or another decode.width"
                )
        self._proved.add(capacity)

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
        mask = sees_SC[None, None].to(device)
        attention_mask: object = mask
        if self._window is not None:
            near_SC = positions_S[:, None] - torch.arange(sees_SC.shape[1])[None] < self._window
            attention_mask = {
                "full_attention": mask,
                "sliding_attention": (sees_SC & near_SC)[None, None].to(device),
            }
        rows = torch.arange(num_logits, device=device)
        output = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=positions_S[None].to(device),
            attention_mask=attention_mask,
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
        self._is_padded = mode == "reproducible"
        self._slots = KvSlots(target._num_layers, capacity)
        self._num_kept = 0

    def prefill(self, ids: list[int]) -> None:
        """Keys for these ids, in chunks; in reproducible mode padded to one size."""
        rows = self._settings.prefill_rows if self._is_padded else max(len(ids), 1)
        for start in range(0, len(ids), rows):
            chunk = ids[start : start + rows]
            self._pass(chunk, list(range(-1, len(chunk) - 1)), rows if self._is_padded else len(chunk), num_logits=0)
            self._num_kept += len(chunk)

    def score(self, tree: DraftTree) -> torch.Tensor:
        num_nodes = len(tree)
        if self._is_padded and not (tree.is_chain and num_nodes <= self._settings.width):
            raise RequestError(f"reproducible mode takes chains of at most {self._settings.width} tokens")
        parents = [-1, *tree.parents[1:]]
        rows = self._settings.width if self._is_padded else num_nodes
        return self._pass(list(tree.tokens), parents, rows, num_logits=num_nodes)

    def keep(self, nodes: Sequence[int]) -> None:
        self._slots.gather([self._num_kept + node for node in nodes], self._num_kept)
        self._num_kept += len(nodes)

    def close(self) -> None:
        self._slots = KvSlots(0, 0)

    def _pass(self, ids: list[int], parents: list[int], rows: int, num_logits: int) -> torch.Tensor:
        start, padding = self._num_kept, rows - len(ids)
        visible = self._slots.capacity if self._is_padded else start + rows
        positions_S, sees_SC = _tree_attention(parents, start, rows, visible)
        self._slots.place(start, visible)
        num_read = rows if self._is_padded and num_logits else num_logits  # the head's matrix product has one width too
        logits = self._target.forward(self._slots, ids + [0] * padding, positions_S, sees_SC, num_read)
        return logits[:num_logits]


def _tree_attention(parents: list[int], start: int, rows: int, visible: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [S] and who sees which slot [S, C]: a node sees all kept ids, its ancestors and itself.

    Padding rows continue the last node as a chain, so that they look like any other row.
    """
    positions_S = torch.empty(rows, dtype=torch.long)
    sees_SC = torch.zeros(rows, visible, dtype=torch.bool)
    sees_SC[:, :start] = True
    for row in range(rows):
        parent = parents[row] if row < len(parents) else row - 1
        positions_S[row] = start if parent < 0 else positions_S[parent] + 1
        if parent >= 0:
            sees_SC[row, start:] = sees_SC[parent, start:]
        sees_SC[row, start + row] = True
    return positions_S, sees_SC


def _sliding_window(config: object) -> int | None:
    types = getattr(config, "layer_types", None) or ()
    return int(config.sliding_window) if "sliding_attention" in types else None  # type: ignore[attr-defined]


def load_target(folder: Path, settings: DecodeSettings, *, name: str, precision: str) -> TransformersTarget:
    """Read a model folder. Raises ModelError when it is not one transformers can run as a causal language model."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    chosen = precisions.automatic() if precision == "auto" else precision
    model = load_model(folder, chosen)
    return TransformersTarget(model, settings, name=name, precision=chosen)


def load_model(folder: Path, precision: str) -> PreTrainedModel:
    """A causal language model without gradients, computing in `precision`."""
    try:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{folder} is not a model folder that transformers can load: {exc}") from exc
    model.requires_grad_(False)
    if torch.cuda.is_available() and precision in ("float32", "bfloat16"):
        model.to("cuda")  # type: ignore[arg-type]
    applied: PreTrainedModel = precisions.apply(model, precision)  # type: ignore[assignment]
    return applied
