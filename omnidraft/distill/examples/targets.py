"""The targets of each form of loss: the rows that it looks at, and the target model's side of the comparison there.

One class serves numpy and torch: a training example holds the targets of one record as arrays, and `collate` joins
those of a packed batch into tensors. A field whose name ends in _N, _NS or _NL has one row per target.
Shapes: N targets, S buckets of single draft tokens, L draft ids of the longest chunk, V draft ids, R rows of logits.
Letters: p is the target's distribution, q the drafter's.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", np.ndarray, Tensor)

Kind = Literal["boundary", "direct", "emitted", "piece", "chunk", "hidden"]
"""The positions that a loss is evaluated at:
boundary: an emitted target token and a draft token start together, and the record has the target's log-probabilities;
direct: the same positions, over the draft tokens that are target tokens;
emitted: the same, also without log-probabilities, wherever the drafter has a token for the emitted one;
piece: the draft pieces of an emitted n-gram;
chunk: draft tokens between two points where the tokenisations meet;
hidden: these points, where the target's hidden states are known. No loss on logits is evaluated there."""

LOG_P_FLOOR = -14.0
"""The least log-probability of a bucket: the log-probabilities of a trace have 11 bits."""


@dataclass(frozen=True, slots=True)
class Targets(Generic[Array]):
    """N targets; those of a loss are in the order of their rows."""

    row_N: Array
    """int64; the row that predicts, the first of several. In an example a row is the index of a draft id, in a batch it
    is a row of the hidden states."""

    def __len__(self) -> int:
        return len(self.row_N)

    def __getitem__(self, chosen: slice) -> Self:
        return replace(self, **{name: getattr(self, name)[chosen] for name in self.columns()})

    @classmethod
    def columns(cls) -> list[str]:
        """Return the names of the fields that have one row per target."""
        return [each.name for each in fields(cls) if each.name.rpartition("_")[2].startswith("N")]

    def tensors(self) -> Any:
        """Return the same targets over tensors."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        arrays = {name: torch.from_numpy(each) for name, each in given.items() if isinstance(each, np.ndarray)}
        return type(self)(**given | arrays)

    @property
    def last_row_N(self) -> Array:
        """The last row that each target looks at."""
        return self.row_N

    def select(self, chosen: slice, logits_RV: Tensor, start: int) -> tuple[Tensor, Any]:
        """Return what a loss takes for these targets: logits and targets. The given logits begin at row `start`."""
        rows: Any = self.row_N[chosen] - start
        return logits_RV.index_select(0, rows), self[chosen]


@dataclass(frozen=True, slots=True)
class BucketTargets(Targets[Array]):
    """The target's probability mass at N positions: a bucket for each of a few draft tokens, and one for the rest.

    Rows with fewer buckets than the widest are padded. See docs/algorithms.md, section 6.
    """

    ids_NS: Array
    """int64; the draft token of each bucket; padding repeats an id of its row."""
    log_p_NS: Array
    """float32, -inf where the mass is zero."""
    real_NS: Array
    """bool, False at padding."""
    log_p_rest_N: Array
    """float32, -inf when nothing is outside the buckets."""
    rest_V: Array | None = None
    """bool; the draft tokens that may be in the rest, the others belong nowhere; None: all."""


@dataclass(frozen=True, slots=True)
class ChunkTargets(Targets[Array]):
    """N chunks of text that both tokenisations close, with the target's likelihood of each.

    The rows that predict the later tokens of a chunk follow `row_N`. See docs/algorithms.md, section 7.
    """

    ids_NL: Array
    """int64; the draft ids of the chunk, anything at padding."""
    num_ids_N: Array
    """int64, at least 1."""
    log_p_N: Array
    """float32; with the boundary after the chunk when `starts_V` is given."""
    tau: float
    """Likelihoods are compared to the power 1 / tau."""
    starts_V: Array | None
    """bool; the draft tokens that start a word. When given, the drafter's probability that one of them follows the
    chunk counts too; None when the boundary does not count."""

    @property
    def last_row_N(self) -> Array:
        """The last row that each chunk looks at."""
        return self.row_N + self.num_ids_N - (0 if self.starts_V is not None else 1)

    def select(self, chosen: slice, logits_RV: Tensor, start: int) -> tuple[Tensor, Any]:
        """Return all given logits and these chunks, whose rows count from the first of the logits."""
        chunks = self[chosen]
        return logits_RV, replace(chunks, row_N=chunks.row_N - start)


@dataclass(frozen=True, slots=True)
class AcceptanceTargets(Targets[Array]):
    """N tokens that the drafter drafted, with the labels that the acceptance head learns; in drafting order.

    See docs/algorithms.md, section 8.
    """

    log_q_N: Array
    """float32; log q at drafting time, summed over all draft tokens that spell the drafted token."""
    label_N: Array
    """float32; the target's probability of the token; where drafting looked at the target's noise, 1 if the token was
    right, else 0."""


@dataclass(frozen=True, slots=True)
class HiddenTargets(Targets[Array]):
    """The last hidden states of a target with the drafter's own layers, at N points where the tokenisations meet."""

    hidden_NH: Array
    """float32."""


LossTargets = BucketTargets[Array] | ChunkTargets[Array] | HiddenTargets[Array]


@dataclass(frozen=True, slots=True)
class Positions:
    """P points of a record where an emitted target token begins at a draft boundary."""

    at_P: np.ndarray
    """int64; the index of the draft id whose hidden state predicts."""
    emitted_P: np.ndarray
    """int64, rising; the index of the target token among the record's emitted ones."""
    draft_P: np.ndarray
    """int64; the draft token that comes next, num_draft where the drafter has none."""
