"""How often the drafter's first candidate is the token the target emitted, on records it does not learn from.

Shapes: N rows of logits, V the drafter's vocabulary, T the target's. Letters: q is the drafter's distribution.
A position agrees when the target token with the largest q, summed over all draft tokens that begin with it, is the
emitted one. A token that was emitted as a merge also agrees when the most probable draft token is the right piece at
each of its pieces, since then greedy drafting spells it; whether an n-gram cache knows it is asked by `hits` only.
Every position of the record counts, the undraftable ones too; only those skipped by batch.py do not.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from omnidraft.distill.examples.collate import LOGIT_ROWS, hidden_rows, pack
from omnidraft.distill.examples.training_example import TrainingExample
from omnidraft.ports import TrainableDrafter
from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.ngram_cache import NgramCache


@torch.no_grad()
def first_candidate_matches(
    model: TrainableDrafter, records: Sequence[TrainingExample], alignment: Alignment, cache: NgramCache | None = None
) -> list[np.ndarray]:
    """Which positions [P] of each record agree, bool.

    Args:
        cache: merges that it does not know do not agree by their pieces; None knows all.
    """
    first_D = torch.from_numpy(alignment.first_D)
    found: dict[int, np.ndarray] = {}
    for group in pack(records):
        hidden_NH = hidden_rows(model, group)
        for place, (index, record) in enumerate(zip(group.indices, group.records, strict=True)):
            at_NH = hidden_NH[group.rows(place, record.at_P)]
            first_P = _first_candidates(model, at_NH, first_D, alignment.num_target).numpy()
            greedy_M = _greedy(model, hidden_NH[group.rows(place, record.piece_at_M)]).numpy()
            found[index] = (first_P == record.emitted_P) | _spelled(record, greedy_M, cache)
    return [found[index] for index in range(len(records))]


def share(hits_of_records: Iterable[np.ndarray]) -> float | None:
    """Agreement over these records; None when they have no position."""
    hits_P = np.concatenate([np.zeros(0, bool), *hits_of_records])
    return float(hits_P.mean()) if len(hits_P) else None


def block_efficiency(hits_of_records: Iterable[np.ndarray], depth: int) -> float | None:
    """Emitted tokens per target pass if chains of `depth` first candidates were drafted; None without positions."""
    num_passes = num_tokens = 0
    for hits_P in hits_of_records:
        at = 0
        while at < len(hits_P):
            wrong = np.flatnonzero(~hits_P[at : at + depth])
            at += (int(wrong[0]) if len(wrong) else len(hits_P[at : at + depth])) + 1
            num_passes += 1
        num_tokens += len(hits_P)
    return num_tokens / num_passes if num_passes else None


def _spelled(record: TrainingExample, greedy_M: np.ndarray, cache: NgramCache | None) -> np.ndarray:
    """Which positions [P] are merges whose pieces are all the drafter's most probable ones."""
    num_wrong_P = np.zeros(len(record.at_P), np.int64)
    np.add.at(num_wrong_P, record.piece_row_M, greedy_M != record.piece_ids_M)
    is_merge_P = np.zeros(len(record.at_P), bool)
    is_merge_P[record.piece_row_M] = True
    spelled_P: np.ndarray = is_merge_P & (num_wrong_P == 0)
    if cache is not None:
        for row in np.flatnonzero(spelled_P):
            pieces = record.piece_ids_M[record.piece_row_M == row].tolist()
            spelled_P[row] = cache.lookup(pieces) == record.emitted_P[row]
    return spelled_P


def _first_candidates(model: TrainableDrafter, hidden_NH: Tensor, first_D: Tensor, num_target: int) -> Tensor:
    """The target id with the largest sum of q at each row."""
    found = []
    for start in range(0, len(hidden_NH), LOGIT_ROWS):
        q_NV = model.logits(hidden_NH[start : start + LOGIT_ROWS])[:, : len(first_D)].softmax(dim=-1)
        q_NT = torch.zeros(len(q_NV), num_target + 1).index_add_(1, first_D[: q_NV.shape[1]], q_NV)
        found.append(q_NT[:, :num_target].argmax(dim=-1))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def _greedy(model: TrainableDrafter, hidden_NH: Tensor) -> Tensor:
    """The most probable draft token at each row."""
    parts = [model.logits(part).argmax(dim=-1) for part in hidden_NH.split(LOGIT_ROWS) if len(part)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
