"""A target whose texts are in transformers' own caches: recurrent layers keep one state, chunks and ALiBi have masks of
their own. Its trees are chains.

Every pass works on a copy of the text's cache, whose keys are shared, since transformers replaces and never changes
them. Then keys are cut back to what was accepted, and recurrent layers get their states behind it, which a pass over
drafts keeps for each row. (Reading what was accepted again, in front of the next chain, took two thirds of the passes
that reading it at once takes, but up to three times the seconds of rows one by one, since transformers computes chunks
of 64 rows.) Nothing is drafted for models whose passes do neither.

Reproducible mode: prompts are read in chunks of one size from position 0, and answers id by id, so nothing is drafted.
Shapes: N nodes of a chain, R rows of a pass, V vocabulary.
"""

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from omnidraft.errors import ModelError
from omnidraft.models.hf.attention import first_context
from omnidraft.models.hf.recurrent_rows import LayerState, RecurrentRows, restore
from omnidraft.models.text_session import ChunkedSession
from omnidraft.models.text_target import TextTarget
from omnidraft.ports import DraftTree, Mode, TreeLimits, ids_needed

logger = logging.getLogger(__name__)

_MAX_NODES = 63
_PROMPT_ROWS, _MAX_ROWS_ON_ACCELERATOR = 64, 512
_NUM_CHECKED = 8
_MAX_SHARE = 0.1
"""Difference of logits in those that another beginning makes: rounding is far below, a forgotten state far above."""
_NUM_STATES = 3
"""States of a text at a time: after the prompt, after what was accepted, and after the last pass."""
_CACHE_NAMES, _IN_MODULES = ("past_key_values", "cache_params", "state"), ("conv1d_state", "recurrent_states")


@dataclass(frozen=True, slots=True)
class TextState:
    """What the model keeps of the first ids of a text."""

    num_ids: int = 0
    cache: Any = None
    in_modules: Sequence[Any] = ()
    """What RecurrentGemma keeps in its modules."""
    by_row: Mapping[int, Sequence[LayerState]] = field(default_factory=dict)
    """The states of recurrent layers behind each row of the last pass, where it kept them."""


class StateReader:
    """Passes of a model over one text, each from a state that stays as it is."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelError where passes do not continue a text, not even id by id."""
        self._model = model
        self._takes = inspect.signature(model.forward).parameters
        self._name = next(name for name in _CACHE_NAMES if name in self._takes)
        self._rows = RecurrentRows(model)
        self._owners = [(each, name) for each in model.modules() for name in _IN_MODULES if hasattr(each, name)]
        self._continues = self._is_cropped = self._has_rows_apart = False
        """Whether passes over several ids do so behind others; whether caches are cut back; see recurrent_rows.py."""
        self._check()

    @property
    def takes_drafts(self) -> bool:
        return self._has_rows_apart or (self._is_cropped and self._continues)

    def _check(self) -> None:
        """Compare passes with those over one id, by what another beginning changes."""
        vocab_size = self._model.config.get_text_config().vocab_size
        first, other, ids = ([(7 * each + kind) % vocab_size for each in range(_NUM_CHECKED)] for kind in range(3))
        whole_RV = self._pass(TextState(), [*first, *ids], _NUM_CHECKED)[0]
        state = self.read_prompt(TextState(), first)
        alone_RV = self.read(state, ids, _NUM_CHECKED)[0]
        changed_RV = self.read(self.read_prompt(TextState(), other), ids, _NUM_CHECKED)[0]

        def is_same(logits_RV: torch.Tensor) -> bool:
            return bool((logits_RV - alone_RV).abs().mean() < _MAX_SHARE * (changed_RV - alone_RV).abs().mean())

        if not is_same(whole_RV):
            kind = self._model.config.get_text_config().model_type
            raise ModelError(f"passes of transformers' {kind} do not go on from what they read before")
        self._continues = is_same(self._pass(state, ids, _NUM_CHECKED)[0])
        self._is_cropped = type(state.cache) is DynamicCache and state.cache.is_croppable
        if self._rows and not any(state.cache.is_sliding):
            self._has_rows_apart = is_same(self._pass(state, ids, _NUM_CHECKED, is_apart=True)[0])
        if not self.takes_drafts:
            logger.warning("nothing is drafted: a pass of this model over several ids leaves only its last state")

    @torch.inference_mode()
    def read(self, state: TextState, ids: Sequence[int], num_logits: int) -> tuple[torch.Tensor, TextState]:
        """Return the logits float32 [R, V] of the last ids of an answer, and the state behind all of them."""
        if len(ids) == 1 or self.takes_drafts:
            return self._pass(state, ids, num_logits, is_apart=self._has_rows_apart and len(ids) > 1)
        logits = []
        for each in ids:
            logits_RV, state = self._pass(state, [each], 1)
            logits.append(logits_RV)
        return torch.cat(logits)[-num_logits:], state

    @torch.inference_mode()
    def read_prompt(self, state: TextState, ids: Sequence[int]) -> TextState:
        """Return the state behind these ids of a prompt."""
        is_whole = self._continues or not state.num_ids
        _, after = self._pass(state, ids, 1) if is_whole else self.read(state, ids, 1)
        return self.cut(after, after.num_ids)

    def cut(self, state: TextState, num_ids: int) -> TextState:
        """Cut the state of a pass back to its first ids, which are no fewer than before it, and drop what is not needed
        any more."""
        back = state.num_ids - num_ids
        if self._is_cropped:
            state.cache.crop(-back)
        elif back:
            restore(state.cache, state.by_row, -1 - back)
            for layer in state.cache.layers:
                if isinstance(layer, DynamicLayer):
                    DynamicLayer.crop(layer, -back)
        return replace(state, num_ids=num_ids, by_row={})

    def num_bytes(self, num_ids: int) -> int:
        """Return the memory of the state of so many ids."""
        copies: dict[int, Any] = {}
        copy.deepcopy(self.read_prompt(TextState(), [0] * num_ids), copies)
        return sum(each.nbytes for each in copies.values() if isinstance(each, torch.Tensor))

    def _pass(
        self, state: TextState, ids: Sequence[int], num_logits: int, *, is_apart: bool = False
    ) -> tuple[torch.Tensor, TextState]:
        device, end = self._model.device, state.num_ids + len(ids)
        cache = self._copied(state)
        options = {
            self._name: cache,
            "position_ids": torch.arange(state.num_ids, end, device=device)[None],
            "logits_to_keep": num_logits,
        }
        options = {name: value for name, value in options.items() if name in self._takes}
        rows: AbstractContextManager[Any] = self._rows.apart() if is_apart else nullcontext({})
        with rows as by_row:
            output = self._model(input_ids=torch.tensor([list(ids)], device=device), use_cache=True, **options)
        in_modules = [getattr(owner, name) for owner, name in self._owners]
        after = TextState(end, getattr(output, self._name, cache), in_modules, by_row)
        return output.logits[0, -num_logits:].float(), after

    def _copied(self, state: TextState) -> Any:
        """Return a copy of the state's cache, None for the model to make one; give the modules a copy of theirs."""
        for (owner, name), own in zip(self._owners, state.in_modules or [None] * len(self._owners), strict=True):
            setattr(owner, name, copy.deepcopy(own))
        if state.cache is not None:
            layers = getattr(state.cache, "layers", ())
            shared = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
            shared.append(getattr(state.cache, "config", None))
            return copy.deepcopy(state.cache, {id(each): each for each in shared if each is not None})
        if not (self._is_cropped or self._owners):
            return None
        cache = DynamicCache(config=self._model.config)
        if self._is_cropped:
            cache.activate_past_recording()
        return cache


class ChainTarget(TextTarget):
    """Implements ports.Target. Texts are computed one after another."""

    def __init__(self, model: PreTrainedModel, *, fingerprint: str) -> None:
        self._reader = StateReader(model.eval())
        config = model.config.get_text_config()
        super().__init__(config.vocab_size, first_context(config), f"{fingerprint}-p{_PROMPT_ROWS}")
        self.max_rows = _PROMPT_ROWS if model.device.type == "cpu" else _MAX_ROWS_ON_ACCELERATOR
        small, large = (self._reader.num_bytes(each) for each in (_NUM_CHECKED, 2 * _NUM_CHECKED))
        self._bytes_of_id = (large - small) // _NUM_CHECKED
        self._bytes_of_state = max(small - _NUM_CHECKED * self._bytes_of_id, 0)

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target. What is read id by id gains nothing from drafts."""
        has_drafts = mode == "fast" and self._reader.takes_drafts
        return TreeLimits(_MAX_NODES if has_drafts else 0, num_chains=1)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "ChainSession":
        """See ports.Target."""
        ids_needed(prompt_ids, max_new_tokens, self.context_limit)
        return ChainSession(self._reader, prompt_ids[:-1], self.limits(mode))

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target."""
        return _NUM_STATES * (self._bytes_of_state + num_ids * self._bytes_of_id)


class ChainSession(ChunkedSession):
    """Implements ports.TargetSession."""

    _chunk = _PROMPT_ROWS

    def __init__(self, reader: StateReader, prompt_ids: Sequence[int], limits: TreeLimits) -> None:
        super().__init__(prompt_ids, limits)
        self._reader = reader
        self._state = self._after = self._of_prompt = TextState()
        """Of the kept ids; after the last pass; of the prompt's whole chunks."""

    def _read(self, ids: Sequence[int]) -> None:
        self._state = self._reader.read_prompt(self._state, ids)
        if len(ids) == _PROMPT_ROWS:
            self._of_prompt = self._state

    def reuse(self, source: "ChainSession", num_ids: int) -> int:
        """Begin with the longest state that another text has of so many first ids."""
        self._require_new()
        states = [source._of_prompt, source._state][: 2 if self.limits.num_nodes else 1]
        fitting = [each for each in states if each.num_ids <= num_ids and source.limits == self.limits]
        self._state = self._of_prompt = max(fitting, key=lambda state: state.num_ids, default=TextState())
        self.num_kept = self._num_read = self._state.num_ids
        return self.num_kept

    def _score(self, tree: DraftTree) -> torch.Tensor:
        logits_NV, self._after = self._reader.read(self._state, tree.tokens, len(tree))
        return logits_NV

    def keep(self, nodes: Sequence[int]) -> None:
        self.num_kept += len(nodes)
        self._state = self._reader.cut(self._after, self.num_kept)

    def close(self) -> None:
        self._state = self._after = self._of_prompt = TextState()
