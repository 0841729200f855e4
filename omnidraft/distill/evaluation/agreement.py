"""Agreement: the share of positions where the drafter's first candidate is the token that the target emitted.

A position agrees when the target token with the largest q, summed over all draft tokens that begin with it, is the
emitted one. A token that was emitted as a merge also agrees when the most probable draft token is the right piece at
each of its pieces, since then greedy drafting spells it; it counts as known to the n-gram cache unless one is given.
Every position of an example counts, the undraftable ones too; tokens that were skipped are no positions.
Shapes: N rows of logits, P positions and M pieces of one example, D draft tokens, V the drafter's rows of logits, T the
target's vocabulary. Letters: q is the drafter's distribution.
Source: docs/algorithms.md, section 11.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.examples.collate import LOGIT_ROWS, pack
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.ports import TrainableDrafter
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache


@torch.no_grad()
def first_candidate_matches(
    model: TrainableDrafter,
    examples: Sequence[TrainingExample],
    alignment: Alignment,
    cache: NgramCache | None = None,
) -> list[np.ndarray]:
    """Return whether each position [P] of each example agrees, bool.

    Args:
        cache: merges that it does not know do not agree by their pieces; None knows all.
    """
    first_D = torch.from_numpy(alignment.first_D)
    matches: list[np.ndarray] = []
    for batch in pack(examples, model.precision):
        if not any(len(each.ids_T) for each in batch.examples):  # of skipped tokens alone
            matches += [np.zeros(0, bool)] * len(batch.examples)
            continue
        hidden_NH = model.hidden(batch.texts())
        for number, example in enumerate(batch.examples):
            at_PH = hidden_NH[batch.rows(number, example.at_P)]
            first_P = _first_candidates(model, at_PH, first_D, alignment.num_target).numpy()
            greedy_M = _greedy(model, hidden_NH[batch.rows(number, example.piece_at_M)]).numpy()
            matches.append((first_P == example.emitted_P) | _spelled(example, greedy_M, cache))
    return matches


def share(hits_of_records: Iterable[np.ndarray]) -> float | None:
    """Return the agreement over these records; None when they have no position."""
    hits_P = np.concatenate([np.zeros(0, bool), *hits_of_records])
    return float(hits_P.mean()) if len(hits_P) else None


def block_efficiency(hits_of_records: Iterable[np.ndarray], depth: int) -> float | None:
    """Return the emitted tokens per target pass if chains of `depth` first candidates were drafted.

    None without positions.
    """
    num_passes = num_tokens = 0
    for hits_P in hits_of_records:
        at = 0
        while at < len(hits_P):
            wrong = np.flatnonzero(~hits_P[at : at + depth])
            at += (int(wrong[0]) if len(wrong) else len(hits_P[at : at + depth])) + 1
            num_passes += 1
        num_tokens += len(hits_P)
    return num_tokens / num_passes if num_passes else None


def _spelled(example: TrainingExample, greedy_M: np.ndarray, cache: NgramCache | None) -> np.ndarray:
    """Return whether each position [P] is a merge whose pieces are all the drafter's most probable ones."""
    num_wrong_P = np.zeros(len(example.at_P), np.int64)
    np.add.at(num_wrong_P, example.piece_row_M, greedy_M != example.piece_ids_M)
    is_merge_P = np.zeros(len(example.at_P), bool)
    is_merge_P[example.piece_row_M] = True
    spelled_P: np.ndarray = is_merge_P & (num_wrong_P == 0)
    if cache is not None:
        for row in np.flatnonzero(spelled_P):
            pieces = example.piece_ids_M[example.piece_row_M == row].tolist()
            spelled_P[row] = cache.peek(pieces) == example.emitted_P[row]
    return spelled_P


def _first_candidates(model: TrainableDrafter, hidden_NH: Tensor, first_D: Tensor, num_target: int) -> Tensor:
    """Return the target id with the largest sum of q at each row."""
    parts = []
    for start in range(0, len(hidden_NH), LOGIT_ROWS):
        q_NV = model.logits(hidden_NH[start : start + LOGIT_ROWS])[:, : len(first_D)].softmax(
            dim=-1, dtype=torch.float32
        )
        q_NT = torch.zeros(len(q_NV), num_target + 1, dtype=torch.float32)
        q_NT.index_add_(1, first_D[: q_NV.shape[1]], q_NV)
        parts.append(q_NT[:, :num_target].argmax(dim=-1))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _greedy(model: TrainableDrafter, hidden_NH: Tensor) -> Tensor:
    """Return the most probable draft token at each row."""
    parts = [model.logits(part).argmax(dim=-1) for part in hidden_NH.split(LOGIT_ROWS) if len(part)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
