"""A target whose passes run in native/kernels/.

Its logits after a text depend on that text only, bit for bit: neither on the tree nor on the number of ids of the pass.
So both modes take the same trees at the same cost, which `self_test` verifies here.
Shapes: N nodes of the tree, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omnidraft.errors import ModeRefused
from omnidraft.models import precision as precisions
from omnidraft.models.kv_session import ROOT
from omnidraft.models.native import library as native
from omnidraft.models.native.model import MAX_ROWS, NativeKvBackend, NativeModel, PassSegment, compute_segments
from omnidraft.models.native.packed_cache import PackedCache
from omnidraft.models.native.packed_model import PackedModel
from omnidraft.models.serial_passes import require_new, require_valid_pass
from omnidraft.models.target_checks import SelfTests, is_deterministic
from omnidraft.ports import DraftTree, Mode, TreeLimits, ids_needed, rotation_offset

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_NODES = 63
_TESTED_CHAINS, _TESTED_WIDTH = 2, 4


class NativeTarget:
    """Implements ports.Target. One pass at a time."""

    def __init__(
        self, model: "PreTrainedModel | PackedModel", *, name: str, precision: str, kernels: str = "auto"
    ) -> None:
        """See NativeModel for precisions, library.load for kernels and errors."""
        self._model = NativeModel(model, precision, native.load(kernels))
        self.vocab_size = self._model.vocab_size
        self.first_context, self.context_limit = self._model.first_context, self._model.context_limit
        self.fingerprint = f"{name}-{precision}-{self._model.bits}"
        self.max_rows = MAX_ROWS
        self._self_tests = SelfTests()

    def limits(self, mode: Mode) -> TreeLimits:
        """See ports.Target."""
        return TreeLimits(_MAX_NODES)

    def open(self, prompt_ids: Sequence[int], max_new_tokens: int, mode: Mode) -> "_Session":
        """See ports.Target. Raises ModeRefused when reproducible mode does not hold on this machine."""
        offset = rotation_offset(self, ids_needed(prompt_ids, max_new_tokens, self.context_limit))
        if mode == "reproducible":
            self._self_tests.require(_TESTED_WIDTH, self.self_test)
        return _Session(self._model, len(prompt_ids), prompt_ids[:-1], offset)

    def forward(
        self, trees: Sequence[tuple[Any, DraftTree]], prompts: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor]:
        """See ports.Target; the sessions are this target's."""
        require_valid_pass(trees, prompts)
        segments = [session.scored_rows(tree) for session, tree in trees]
        unscored = [session.prompt_rows(num_ids) for session, num_ids in prompts]
        logits = compute_segments(self._model, [*segments, *unscored])
        for session, num_ids in prompts:
            session.num_kept += num_ids
        return logits[: len(segments)]

    def reuse(self, session: Any, source: Any, num_ids: int) -> int:
        """See ports.Target; the sessions are this target's."""
        require_new(session)
        return session.copy_keys(source, num_ids)

    def kv_bytes(self, num_ids: int, mode: Mode) -> int:
        """See ports.Target."""
        return self._model.kv_bytes(num_ids)

    def self_test(self) -> None:
        """Compare passes over trees with one id at a time, bit by bit.

        Raises:
            ModeRefused: some bit differs, so reproducible mode cannot be promised here.
        """
        chains, width = _TESTED_CHAINS, _TESTED_WIDTH
        alone, blocks = (_Session(self._model, 2 * width + chains * width) for _ in range(2))
        if not is_deterministic(alone, blocks, vocab_size=self.vocab_size, chains=chains, width=width):
            raise ModeRefused(f"reproducible mode does not hold for {self.fingerprint}")


class _Session:
    """Implements ports.TargetSession."""

    def __init__(
        self, model: NativeModel, capacity: int, prompt_ids: Sequence[int] = (), rotation_offset: int = 0
    ) -> None:
        """Begin with `capacity` slots; more come with the text, since memory is counted by ids that are there."""
        self._model = model
        self._backend = NativeKvBackend(model, capacity, rotation_offset=rotation_offset)
        self._prompt_ids = tuple(prompt_ids)
        self.num_kept = 0

    @property
    def num_unread(self) -> int:
        return max(len(self._prompt_ids) - self.num_kept, 0)

    def prompt_rows(self, num_ids: int) -> PassSegment:
        """Return the rows of so many unread prompt ids; the pass makes them kept."""
        return self._backend.segment(self.num_kept, None, self._prompt_ids[self.num_kept :][:num_ids], 0)

    def scored_rows(self, tree: DraftTree) -> PassSegment:
        """Return the rows of a tree behind the kept ids."""
        return self._backend.segment(self.num_kept, [ROOT, *tree.parents[1:]], tree.tokens, len(tree))

    def copy_keys(self, source: "_Session", num_ids: int) -> int:
        """Copy the keys of the first ids, as many as are stored there and unread here; return their number. None are
        copied that were rotated otherwise."""
        if source._backend.rotation_offset != self._backend.rotation_offset:
            return 0
        self.num_kept = min(num_ids, source.num_kept, self.num_unread)
        self._backend.copy(source._backend, self.num_kept)
        return self.num_kept

    def score(self, tree: DraftTree) -> torch.Tensor:
        if self.num_unread:
            compute_segments(self._model, [self.prompt_rows(self.num_unread)])
            self.num_kept += self.num_unread
        return compute_segments(self._model, [self.scored_rows(tree)])[0]

    def keep(self, nodes: Sequence[int]) -> None:
        self._backend.move([self.num_kept + node for node in nodes], self.num_kept)
        self.num_kept += len(nodes)

    def close(self) -> None:
        self._backend = NativeKvBackend(self._model)


def cached_target(folder: Path, *, name: str, precision: str, kernels: str, cache: PackedCache) -> NativeTarget | None:
    """Return the target of a model folder that is packed, None if it is not.

    Raises:
        ModelError: nothing can compute it here.
    """
    chosen = precisions.automatic(kernels) if precision == "auto" else precision
    if chosen not in native.PACKED or torch.cuda.is_available():
        return None
    weights = cache.find(folder, chosen)
    return None if weights is None else NativeTarget(weights, name=name, precision=chosen, kernels=kernels)
