"""A target whose texts are in transformers' own caches: recurrent layers keep one state, chunks and ALiBi have masks of
their own. Its trees are chains.

Every pass works on a copy of the text's state, whose keys are shared, since transformers replaces and never changes
them. Where all of a chain was accepted, the copy is the text's state from then on. Else keys are cut back; a recurrent
state cannot be, so the state before stays, and what was accepted is read again by the next pass, in front of its chain.
That takes fewer passes than reading it at once, and the next pass's seconds show what it costs.

Reproducible mode: prompts are read in chunks of one size from position 0, and answers id by id, so nothing is drafted.
Shapes: N nodes of a chain, R rows of a pass, V vocabulary.
"""

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from omnidraft.errors import ContractError, ModelError
from omnidraft.models.hf.attention import context_limit
from omnidraft.models.serial_passes import forward_serially, require_new
from omnidraft.ports import DraftTree, Mode, TreeLimits, ids_needed

logger = logging.getLogger(__name__)

_MAX_NODES = 63
_MAX_READ_AGAIN = 8
"""Accepted ids that a pass reads again in front of its chain; more are read by a pass of their own."""
_PROMPT_ROWS, _MAX_ROWS_ON_ACCELERATOR = 64, 512
_NUM_CHECKED = 8
_MAX_DIFFERENCE = 0.1
"""Difference of logits in those that another beginning makes: rounding is far below, a forgotten state far above."""
_NUM_STATES = 3
"""States of a text at a time: after the prompt, after what was accepted, and after the last pass."""
_NO_LIMIT = (0.0, float("inf"))
_CACHE_NAMES, _IN_MODULES = ("past_key_values", "cache_params", "state"), ("conv1d_state", "recurrent_states")


@dataclass(frozen=True, slots=True)
class TextState:
    """What the model keeps of the first ids of a text."""

    num_ids: int = 0
    cache: Any = None
    in_modules: Sequence[Any] = ()
    """What RecurrentGemma keeps in its modules."""


class StateReader:
    """Passes of a model over one text, each from a state that stays as it is."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelError where passes do not continue a text, not even id by id."""
        self._model = model
        self._takes = inspect.signature(model.forward).parameters
        self._name = next(name for name in _CACHE_NAMES if name in self._takes)
        limited: list[Any] = [each for each in model.modules() if hasattr(each, "time_step_limit")]
        self._limits = {module: module.time_step_limit for module in limited}
        self._owners = [(each, name) for each in model.modules() for name in _IN_MODULES if hasattr(each, name)]
        self.is_cropped = False
        """Whether caches are cut back behind rejected drafts."""
        self.takes_rows = True
        """Whether a pass over several ids continues a text as passes over one do; some forget what was before."""
        self._check()

    def _check(self) -> None:
        """Compare a pass over several ids, ids one by one, and a whole text with what another beginning changes."""
        vocab_size = self._model.config.get_text_config().vocab_size
        first, other, ids = ([(7 * each + kind) % vocab_size for each in range(_NUM_CHECKED)] for kind in range(3))
        whole_RV, _ = self.read(TextState(), [*first, *ids], _NUM_CHECKED)
        _, state = self.read(TextState(), first, 1)
        self.is_cropped = type(state.cache) is DynamicCache and state.cache.is_croppable
        together_RV, _ = self.read(state, ids, _NUM_CHECKED)
        self.takes_rows = False
        alone_RV, _ = self.read(state, ids, _NUM_CHECKED)
        changed_RV, _ = self.read(self.read(TextState(), other, 1)[1], ids, _NUM_CHECKED)
        noticed = _MAX_DIFFERENCE * (changed_RV - alone_RV).abs().mean()
        self.takes_rows = bool((together_RV - alone_RV).abs().mean() < noticed)
        if (whole_RV - alone_RV).abs().mean() > noticed:
            kind = self._model.config.get_text_config().model_type
            raise ModelError(f"passes of transformers' {kind} do not go on from what they read before")
        if not self.takes_rows:
            logger.warning("nothing is drafted: the model's passes over several ids forget what was before them")

    @torch.inference_mode()
    def read(
        self, state: TextState, ids: Sequence[int], num_logits: int, *, is_prompt: bool = False
    ) -> tuple[torch.Tensor, TextState]:
        """Return the logits float32 [R, V] of the last ids, and the state behind all of them."""
        step = len(ids) if self.takes_rows or not state.num_ids else 1
        logits = []
        for start in range(0, len(ids), step):
            rows = ids[start : start + step]
            with self._steps_as_in(is_prompt=is_prompt):
                logits_RV, state = self._pass(state, rows, min(num_logits, len(rows)))
            logits.append(logits_RV)
        return torch.cat(logits)[-num_logits:], state

    def read_prompt(self, state: TextState, ids: Sequence[int]) -> TextState:
        """Return the state behind these ids of a prompt."""
        _, after = self.read(state, ids, 1, is_prompt=True)
        return self.cropped(after, after.num_ids)

    def cropped(self, state: TextState, num_ids: int) -> TextState:
        """Cut a state back to its first ids, as `is_cropped` allows, and drop what no further pass needs."""
        if self.is_cropped:
            state.cache.crop(num_ids - state.num_ids)
        return replace(state, num_ids=num_ids)

    def num_bytes(self, num_ids: int) -> int:
        """Return the memory of the state of so many ids."""
        copies: dict[int, Any] = {}
        copy.deepcopy(self.read_prompt(TextState(), [0] * num_ids), copies)
        return sum(each.nbytes for each in copies.values() if isinstance(each, torch.Tensor))

    @contextmanager
    def _steps_as_in(self, *, is_prompt: bool) -> Iterator[None]:
        """Limit the steps of Mamba 2 as transformers does: in passes over several ids, but not in those over one."""
        for module, limit in self._limits.items():
            module.time_step_limit = limit if is_prompt else _NO_LIMIT
        yield
        for module, limit in self._limits.items():
            module.time_step_limit = limit

    def _pass(self, state: TextState, ids: Sequence[int], num_logits: int) -> tuple[torch.Tensor, TextState]:
        device, end = self._model.device, state.num_ids + len(ids)
        cache = self._copied(state)
        options = {
            self._name: cache,
            "position_ids": torch.arange(state.num_ids, end, device=device)[None],
            "logits_to_keep": num_logits,
        }
        options = {name: value for name, value in options.items() if name in self._takes}
        output = self._model(input_ids=torch.tensor([list(ids)], device=device), use_cache=True, **options)
        in_modules = [getattr(owner, name) for owner, name in self._owners]
        after = TextState(end, getattr(output, self._name, cache), in_modules)
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
        if not (self.is_cropped or self._owners):
            return None
        cache = DynamicCache(config=self._model.config)
        if self.is_cropped:
            cache.activate_past_recording()
        return cache


class ChainTarget:
    """Implements ports.Target. Texts are computed one after another."""

    def __init__(self, model: PreTrainedModel, *, fingerprint: str) -> None:
        self._reader = StateReader(model.eval())
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context_limit = context_limit(config)
        self.fingerprint = f"{fingerprint}-p{_PROMPT_ROWS}"
        self.max_rows = _PROMPT_ROWS if model.device.type == "cpu" else _MAX_ROWS_ON_ACCELERATOR
        small, large = (self._reader.num_bytes(each) for each in (_NUM_CHECKED, 2 * _NUM_CHECKED))
        self._bytes_of_id = (large - small) // _NUM_CHECKED
        self._bytes_of_state = max(small - _NUM_CHECKED * self._bytes_of_id, 0)

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target. What is read id by id gains nothing from drafts."""
        has_drafts = mode == "fast" and self._reader.takes_rows
        is_read_again = has_drafts and not self._reader.is_cropped
        return TreeLimits(_MAX_NODES if has_drafts else 0, num_chains=1, is_read_again=is_read_again)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "ChainSession":
        """See ports.Target."""
        ids_needed(prompt_ids, max_new_tokens, self.context_limit)
        return ChainSession(self._reader, self.limits(mode), prompt_ids[:-1])

    def forward(
        self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor]:
        """See ports.Target; the sessions are this target's."""
        return forward_serially(trees, prompts)

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        """See ports.Target; the sessions are this target's."""
        require_new(session)
        return session.begin_with(source, num_ids)

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target."""
        return _NUM_STATES * (self._bytes_of_state + num_ids * self._bytes_of_id)


class ChainSession:
    """Implements ports.TargetSession."""

    def __init__(self, reader: StateReader, limits: TreeLimits, prompt_ids: Sequence[int]) -> None:
        self._reader = reader
        self._limits = limits
        self._prompt_ids = tuple(prompt_ids)
        self._state = self._after = self._of_prompt = TextState()
        """Of the kept ids but the last accepted ones; after the last pass; of the prompt's whole chunks."""
        self._accepted: tuple[int, ...] = ()
        """The ids behind `_state`, which the next pass reads again."""
        self._tree = DraftTree.empty(0)
        self.num_kept = 0

    @property
    def num_unread(self) -> int:
        return max(len(self._prompt_ids) - self.num_kept, 0)

    def read(self, num_ids: int) -> None:
        """Count so many unread prompt ids as kept; compute the chunks that hold them, whole ones from position 0."""
        end = self.num_kept + num_ids
        while self._state.num_ids < end:
            start = self._state.num_ids
            chunk = self._prompt_ids[start : start + _PROMPT_ROWS]
            self._state = self._reader.read_prompt(self._state, chunk)
            if len(chunk) == _PROMPT_ROWS:
                self._of_prompt = self._state
        self.num_kept = end

    def begin_with(self, source: "ChainSession", num_ids: int) -> int:
        """Begin with the longest state that another text has of so many first ids; return the number of ids."""
        states = [source._of_prompt, source._state][: 2 if self._limits.num_nodes else 1]
        fitting = [each for each in states if each.num_ids <= num_ids and source._limits == self._limits]
        self._state = self._of_prompt = max(fitting, key=lambda state: state.num_ids, default=TextState())
        self.num_kept = self._state.num_ids
        return self.num_kept

    def score(self, tree: DraftTree) -> torch.Tensor:
        if not tree.fits(self._limits):
            raise ContractError(f"a tree of {len(tree) - 1} drafted nodes does not fit {self._limits}")
        if self.num_unread:
            self.read(self.num_unread)
        if len(self._accepted) > _MAX_READ_AGAIN:
            _, self._state = self._reader.read(self._state, self._accepted, 1)
            self._accepted = ()
        logits_NV, self._after = self._reader.read(self._state, [*self._accepted, *tree.tokens], len(tree))
        self._tree = tree
        return logits_NV

    def keep(self, nodes: Sequence[int]) -> None:
        self.num_kept += len(nodes)
        if self._reader.is_cropped:
            self._state = self._reader.cropped(self._after, self.num_kept)
        elif len(nodes) == len(self._tree):
            self._state, self._accepted = self._after, ()
        else:
            self._accepted += tuple(self._tree.tokens[node] for node in nodes)

    def close(self) -> None:
        self._state = self._after = self._of_prompt = TextState()
