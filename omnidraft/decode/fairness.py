"""Fairness over clients: who has more of the admitted sequences than its share."""

from collections import Counter
from collections.abc import Sequence

from omnidraft.decode.sequence import SequenceState


def clients_of(sequences: Sequence[SequenceState]) -> list[str]:
    """Return the client of each sequence."""
    return [each.client for each in sequences]


def is_unfair_to(client: str, admitted: Counter[str]) -> bool:
    """Return whether another client has at least two sequences more than this one, given the number of each."""
    return max(admitted.values(), default=0) >= admitted[client] + 2


def most_admitted(admitted: Counter[str]) -> str:
    """Return the client with most sequences."""
    return max(admitted, key=lambda client: admitted[client])
