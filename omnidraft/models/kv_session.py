"""A drafter's session over any KV store: it decides which rows to compute and which keys of branches to reuse.

Shapes: R new rows, V vocabulary, H hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from omnidraft.models.acceptance_head import AcceptanceHead
from omnidraft.ports import AcceptanceFn

ROOT = -1
"""Parent of a branch that directly follows the text."""


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A request to compute rows of one text."""

    length: int
    """Number of ids of the text before the rows, whose keys are stored."""
    parents: Sequence[int] | None
    """Parents of all nodes of a tree behind these, of which `ids` are the last; node n is in slot `length + n`, and the
    keys of the nodes before `ids` are stored. None: a chain, of which only the last logits are needed."""
    ids: Sequence[int]


ForwardSteps = Generator[ForwardRequest, torch.Tensor, torch.Tensor]
"""Yields at most one request, is sent its logits [R, V], and returns the logits that its caller needs."""


class KvBackend(Protocol):
    """Keys and values of one text; id number n uses slot n."""

    hidden_RH: torch.Tensor
    """float32, the normed last hidden states behind the logits of the last call; read by sessions with a head only."""

    def compute(self, request: ForwardRequest) -> torch.Tensor:
        """Return the logits float32 [1, V] after the last id of a chain, or [R, V] after the last R nodes of a tree."""

    def move(self, sources: Sequence[int], start: int) -> None:
        """Move the keys of these ascending slots to `start`, `start + 1`, ..., which is never a later slot."""


class BranchingSession:
    """Implements ports.DraftSession."""

    def __init__(self, backend: KvBackend, head: AcceptanceHead | None = None) -> None:
        self.backend = backend
        self._head = head
        self._length = 0
        self._state_RH: Sequence[torch.Tensor] = ()
        self._clear_branches()

    def prefill_or_extend(self, keep: int, ids: Sequence[int]) -> torch.Tensor:
        """See ports.DraftSession."""
        return _run_single(self.prefill_or_extend_steps(keep, ids), self.backend.compute)

    def branch(self, ids: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """See ports.DraftSession."""
        return _run_single(self.branch_steps(ids, parents), self.backend.compute)

    def prefill_or_extend_steps(self, keep: int, ids: Sequence[int]) -> ForwardSteps:
        """Run `prefill_or_extend` as steps, so that the caller can batch the computation."""
        path = self._matching_path(ids) if keep == self._length else []
        self.backend.move([keep + node for node in path], keep)
        new_ids = ids[len(path) :]
        logits_V = (yield ForwardRequest(keep + len(path), None, new_ids))[0] if new_ids else self._logits[path[-1]]
        self._state_RH = self._new_hidden() if new_ids else self._hidden[path[-1] : path[-1] + 1]
        self._length = keep + len(ids)
        self._clear_branches()
        return logits_V

    def branch_steps(self, ids: Sequence[int], parents: Sequence[int]) -> ForwardSteps:
        """Run `branch` as steps, so that the caller can batch the computation."""
        logits_RV = yield ForwardRequest(self._length, [*self._parents, *parents], ids)
        self._parents += parents
        self._ids += ids
        self._logits += logits_RV
        self._state_RH = self._new_hidden()
        self._hidden += self._state_RH
        return logits_RV

    def acceptance_probabilities(self) -> Sequence[AcceptanceFn] | None:
        """See ports.DraftSession."""
        return None if self._head is None else self._head.acceptance_probabilities(torch.stack(list(self._state_RH)))

    def _new_hidden(self) -> Sequence[torch.Tensor]:
        return () if self._head is None else list(self.backend.hidden_RH)

    def _clear_branches(self) -> None:
        self._parents: list[int] = []
        self._ids: list[int] = []
        self._logits: list[torch.Tensor] = []
        self._hidden: list[torch.Tensor] = []

    def _matching_path(self, ids: Sequence[int]) -> list[int]:
        """Return the path of branches that spells these ids, as far as there is one."""
        path: list[int] = []
        for token in ids:
            siblings = zip(self._parents, self._ids, strict=True)
            parent = path[-1] if path else ROOT
            node = next((node for node, each in enumerate(siblings) if each == (parent, token)), None)
            if node is None:
                break
            path.append(node)
        return path


def _run_single(steps: ForwardSteps, compute: Callable[[ForwardRequest], torch.Tensor]) -> torch.Tensor:
    try:
        steps.send(compute(next(steps)))
    except StopIteration as done:
        returned: torch.Tensor = done.value
        return returned
    raise AssertionError("steps yielded a second request")


def run_batched(
    all_steps: Sequence[ForwardSteps], compute: Callable[[Sequence[tuple[int, ForwardRequest]]], Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Run all steps with one call of `compute`, which gets every request with the index of its steps; return their
    results."""
    returned: dict[int, torch.Tensor] = {}
    requests: list[tuple[int, ForwardRequest]] = []
    for number, steps in enumerate(all_steps):
        try:
            requests.append((number, next(steps)))
        except StopIteration as done:
            returned[number] = done.value
    for (number, _), logits_RV in zip(requests, compute(requests) if requests else (), strict=True):
        try:
            all_steps[number].send(logits_RV)
        except StopIteration as done:
            returned[number] = done.value
    return [returned[number] for number in range(len(all_steps))]


class BatchingDrafter(ABC):
    """The calls of ports.DraftModel on several sessions, over `forward`."""

    @abstractmethod
    def forward(self, batch: Sequence[tuple[Any, ForwardRequest]]) -> list[torch.Tensor]:
        """Compute one request of each of these different KV backends in as few passes as possible."""

    @abstractmethod
    def with_factors(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], "BranchingSession"]:
        """Return what opens sessions that add these low-rank factors to the shared weights; see low_rank.py. They take
        part in this model's passes beside all others. Raises SnapshotCorrupt when the factors do not fit."""

    def prefill_or_extend_all(self, requests: Sequence[tuple[Any, int, Sequence[int]]]) -> list[torch.Tensor]:
        """See ports.DraftModel; the sessions are this model's."""
        steps = [session.prefill_or_extend_steps(keep, ids) for session, keep, ids in requests]
        return self._run_batched([session for session, *_ in requests], steps)

    def branch_all(self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]]) -> list[torch.Tensor]:
        """See ports.DraftModel."""
        steps = [session.branch_steps(ids, parents) for session, ids, parents in requests]
        return self._run_batched([session for session, *_ in requests], steps)

    def _run_batched(self, sessions: Sequence[BranchingSession], steps: Sequence[ForwardSteps]) -> list[torch.Tensor]:
        def compute(batch: Sequence[tuple[int, ForwardRequest]]) -> Sequence[torch.Tensor]:
            return self.forward([(sessions[number].backend, each) for number, each in batch])

        return run_batched(steps, compute)
