"""The rows of one `generate` call: each grows by its own draws, through transformers' logits processors and stopping
criteria, and `generate`'s result is put together from them.

A processor or criterion sees what it would see without drafts: the row with its padding and everything emitted so far,
one call a token, in order.
Shapes: V vocabulary, S steps of the longest row.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from omnidraft.errors import RequestError
from omnidraft.ports import FinishReason

_NONE_LEFT = "the logits processors leave no token that can follow"


class Constraint(Protocol):
    """A grammar that one text is kept to."""

    def apply(self, logits_V: np.ndarray) -> None:
        """Exclude tokens in place. Raises RequestError when none is left."""

    def take(self, token: int) -> None:
        """Add the token that was drawn."""


class GenerateRow:
    """One row of the batch, prompt and padding included."""

    def __init__(self, prompt_ids: torch.Tensor, num_padding: int, max_length: int) -> None:
        """Begin with the row `prompt_ids`, whose first `num_padding` ids are no text; it may grow to `max_length`."""
        self.num_prompt_ids = len(prompt_ids)
        self.prompt = tuple(prompt_ids[num_padding:].tolist())
        """The ids of the prompt without padding."""
        self.max_length = max_length
        self.num_ids = self.num_prompt_ids
        self._buffer = prompt_ids.new_zeros(1, max_length)
        self._buffer[0, : self.num_ids] = prompt_ids

    @property
    def ids(self) -> torch.Tensor:
        """The row as a batch of its own, [1, length]."""
        return self._buffer[:, : self.num_ids]

    @property
    def emitted(self) -> torch.Tensor:
        """The ids that were generated."""
        return self._buffer[0, self.num_prompt_ids : self.num_ids]

    def append(self, token: int) -> None:
        """Add a generated id."""
        self._buffer[0, self.num_ids] = token
        self.num_ids += 1


class RowScores:
    """The scores and logits of a row's draws, of those that were asked for."""

    def __init__(self, *, has_scores: bool, has_logits: bool) -> None:
        self.scores: list[torch.Tensor] | None = [] if has_scores else None
        self.logits: list[torch.Tensor] | None = [] if has_logits else None

    def add(self, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Add those of one draw, [1, V] each."""
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(logits)


class RowDistributions:
    """Implements ports.TokenDistributions by the processors of a `generate` call."""

    def __init__(
        self,
        row: GenerateRow,
        processors: LogitsProcessorList,
        scores: RowScores,
        constraint: Constraint | None,
        *,
        is_sampled: bool,
    ) -> None:
        """Draw from what the processors leave; without `is_sampled` the id of the largest score."""
        self._row = row
        self._processors = processors
        self._scores = scores
        self._constraint = constraint
        self._is_sampled = is_sampled

    def distribution(self, logits_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See ports.TokenDistributions. Raises RequestError when no token is left; greedily without a constraint it is
        the first id then, as in `generate`."""
        logits_V = logits_V.copy()  # the target's, which processors may change
        if self._constraint is not None:
            self._constraint.apply(logits_V)
        ids = self._row.ids
        logits = torch.from_numpy(logits_V)[None].to(ids.device)
        raw = logits.clone() if self._scores.logits is not None else logits
        scores = self._processors(ids, logits)  # type: ignore[arg-type]
        self._scores.add(raw, scores)
        if not self._is_sampled:
            if self._constraint is not None and not scores.max() > -torch.inf:  # or NaN, normalized
                raise RequestError(_NONE_LEFT)
            return scores.argmax(dim=-1).cpu().numpy(), np.ones(1)
        p_V = torch.softmax(scores, dim=-1)[0].cpu().numpy()
        if np.isnan(p_V[0]):
            raise RequestError(_NONE_LEFT)
        return np.arange(len(p_V)), p_V

    def take(self, token: int) -> None:
        """See ports.TokenDistributions."""
        self._row.append(token)
        if self._constraint is not None:
            self._constraint.take(token)


class RowStop:
    """Implements ports.StopCondition by the stopping criteria of a `generate` call. It shows no text."""

    def __init__(self, row: GenerateRow, criteria: StoppingCriteriaList, scores: RowScores) -> None:
        self._row = row
        self._criteria = criteria
        self._scores = scores
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None

    def ends(self, token: int) -> bool:
        """See ports.StopCondition. The row has the token already."""
        scores = None if self._scores.scores is None else tuple(self._scores.scores)
        is_over = bool(self._criteria(self._row.ids, scores).any())  # type: ignore[arg-type]
        if self._row.num_ids >= self._row.max_length:
            self.finish_reason = FinishReason.LENGTH
        elif is_over:
            self.finish_reason = FinishReason.STOP
        return self.finish_reason is not None

    def take(self) -> str:
        """See ports.StopCondition."""
        return ""


def sequences(rows: Sequence[GenerateRow], pad_id: int) -> torch.Tensor:
    """Return all rows, those that ended early padded behind their ends."""
    longest = max(row.num_ids for row in rows)
    padded = [torch.nn.functional.pad(row.ids[0], (0, longest - row.num_ids), value=pad_id) for row in rows]
    return torch.stack(padded)


def by_step(columns: Sequence[list[torch.Tensor] | None]) -> tuple[torch.Tensor, ...] | None:
    """Return one tensor of all rows for each step, with zeros for rows that had ended; None where a row has none."""
    given = [column for column in columns if column is not None]
    if len(given) < len(columns):
        return None
    zeros = torch.zeros_like(given[0][0])
    num_steps = max(len(column) for column in given)
    return tuple(
        torch.cat([column[step] if step < len(column) else zeros for column in given]) for step in range(num_steps)
    )
