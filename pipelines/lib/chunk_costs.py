"""What transferred models pay beside the original, by kinds of chunks: in nats, and where it comes from.

Both models are compared on chunks, the bytes between two points where their tokenisations meet.
Shapes: V new ids, T new ids and O old ids of a text, P points, C chunks.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from omnidraft.transfer.texts import AlignedText

OCCURRENCES = (0, 1, 4, 16, 64, 512)
"""The least occurrences of each class of chunks."""
PIECES = (1, 2, 3)
"""The least new tokens of each class of chunks."""


def occurrences(texts: Iterable[AlignedText], vocab_size: int) -> np.ndarray:
    """Return how often each id is learned, int64 [V]."""
    count_V = np.zeros(vocab_size, np.int64)
    for text in texts:
        np.add.at(count_V, text.new_ids_T[1:], 1)
    return count_V


def rarest_occurrences(text: AlignedText, count_V: np.ndarray) -> np.ndarray:
    """Return how often the rarest new token of each chunk was learned, [C]."""
    return np.minimum.reduceat(count_V[text.new_ids_T[1:]], text.new_at_P[:-1])


def num_pieces(text: AlignedText) -> np.ndarray:
    """Return the number of new tokens of each chunk, [C]."""
    return np.diff(text.new_at_P)


def nats_by_class(
    before: Iterable[np.ndarray],
    after: Iterable[np.ndarray],
    texts: Sequence[AlignedText],
    amounts: Callable[[AlignedText], np.ndarray],
    least: Sequence[int],
) -> list[dict[str, float]]:
    """Return a row for each class: its chunks, and what they cost each model in nats.

    Args:
        before: the nats of each text's old ids but the first, under the original.
        after: those of its new ids, under the transferred model.
        amounts: what its chunks are divided by, [C].
        least: the least amount of each class.
    """
    rows = [{"at_least": float(each), "chunks": 0.0, "before": 0.0, "after": 0.0} for each in least]
    for text, before_O, after_T in zip(texts, before, after, strict=True):
        before_C = np.add.reduceat(before_O, text.old_at_P[:-1])
        after_C = np.add.reduceat(after_T, text.new_at_P[:-1])
        class_C = np.searchsorted(least, amounts(text), side="right") - 1
        for number, row in enumerate(rows):
            row["chunks"] += float((class_C == number).sum())
            row["before"] += float(before_C[class_C == number].sum())
            row["after"] += float(after_C[class_C == number].sum())
    return rows
