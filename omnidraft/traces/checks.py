"""Checks that a record must pass before it is written or learned from; every error names the field.

The rules of single fields stand in record.py; here are those of columns among each other.
Shapes as in record.py: E emitted tokens, K log-probabilities recorded, R rounds, M drafted nodes, D draft tokens.
"""

from collections.abc import Mapping

import numpy as np

from omnidraft.errors import WireError
from omnidraft.traces.record import Rounds, TargetLogprobs, TraceRecord, fields_of


def check(record: TraceRecord) -> None:
    """Check a record against record.py.

    Raises:
        WireError: names the field that is wrong.
    """
    _check_fields(record)
    num_emitted, logprobs, rounds = len(record.emitted_ids), record.beliefs, record.rounds
    if logprobs is not None:
        _check_lengths(logprobs, {"E": num_emitted, "EK": num_emitted})
        shape, expected = logprobs.top_log_p_EK.shape, logprobs.top_ids_EK.shape
        _require(shape == expected, "top_log_p_EK", f"shape {shape}, not {expected}")
        _check_fields(logprobs)
    num_nodes, num_draft_ids = (int(x.sum(dtype=np.int64)) for x in (rounds.num_nodes_R, rounds.num_draft_ids_R))
    _check_lengths(rounds, {"R": len(rounds.num_nodes_R), "M": num_nodes, "D": num_draft_ids})
    _check_fields(rounds)
    _check_trees(rounds, num_emitted)


def _require(is_valid: bool | np.bool_, field: str, problem: str) -> None:
    if not is_valid:
        raise WireError(f"{field}: {problem}")


def _check_fields(holder: TraceRecord | TargetLogprobs | Rounds) -> None:
    for field in fields_of(type(holder)):
        value = getattr(holder, field.name)
        for rule in () if value is None and field.is_optional else field.rules:
            problem = "holds values that are not" if field.is_column else f"{value!r:.100} is not"
            _require(rule.is_met(value), field.name, f"{problem} {rule.allowed}")


def _check_lengths(holder: TargetLogprobs | Rounds, lengths: Mapping[str, int]) -> None:
    """Check that a column is as long as the last part of its name says."""
    for field in fields_of(type(holder)):
        length, expected = len(getattr(holder, field.name)), lengths[field.name.rpartition("_")[2]]
        _require(length == expected, field.name, f"{length} values, expected {expected}")


def _check_trees(rounds: Rounds, num_emitted: int) -> None:
    """Check the sums, and that every round is a tree: the parent of a node precedes it in the same round."""
    total = int(rounds.num_emitted_R.sum(dtype=np.int64))
    if len(rounds.num_emitted_R):
        _require(total == num_emitted, "num_emitted_R", f"adds up to {total}, but {num_emitted} ids were emitted")
    num_nodes_R = rounds.num_nodes_R.astype(np.int64)
    starts_R = np.cumsum(num_nodes_R) - num_nodes_R
    index_M = np.arange(len(rounds.parents_M)) - np.repeat(starts_R, num_nodes_R) + 1
    _require(not (rounds.parents_M >= index_M).any(), "parents_M", "a parent does not stand before its child")
    num_before = np.concatenate(([0], np.cumsum(rounds.accepted_M, dtype=np.int64)))
    accepted_R = num_before[starts_R + num_nodes_R] - num_before[starts_R]
    is_equal = (accepted_R == rounds.num_accepted_R).all()
    _require(is_equal, "num_accepted_R", "does not count the accepted nodes of its rounds")
