"""Checks that a record must pass before it is written or learned from; every error names the field.

Shapes as in record.py: E emitted tokens, K log-probabilities recorded, R rounds, M drafted nodes, D draft tokens.
"""

from typing import get_args

import numpy as np

from omnidraft.config import Mode
from omnidraft.errors import WireError
from omnidraft.params import DEFAULTS, ROWS
from omnidraft.traces.record import SOURCES, FinishReason, Rounds, TargetLogprobs, TraceRecord
from omnidraft.traces.schema import MAX_EMITTED, MAX_ID, MAX_INT, MAX_TOP_K

MAX_TENANT_BYTES = 1024
LOG_P_ROUNDING = 1e-2
"""float16 log-probabilities may lie this far above 0."""


def check(record: TraceRecord) -> None:
    """Check a record against record.py.

    Raises:
        WireError: names the field that is wrong.
    """
    _check_settings(record)
    num_emitted = len(record.emitted_ids)
    _require(1 <= num_emitted <= MAX_EMITTED, "emitted_ids", f"{num_emitted} ids, allowed are 1 to {MAX_EMITTED}")
    for name in ("drafter_prompt_ids", "prompt_ids", "before_ids", "emitted_ids"):
        _check_ids(name, getattr(record, name))
    if record.beliefs is not None:
        _check_logprobs(record.beliefs, num_emitted)
    _check_rounds(record.rounds, num_emitted)


def _require(is_valid: bool, field: str, problem: str) -> None:
    if not is_valid:
        raise WireError(f"{field}: {problem}")


def _check_settings(record: TraceRecord) -> None:
    for name in ("request_id", "target", "drafter", "alignment"):
        _require(bool(getattr(record, name)), name, "is empty")
    size = len(record.tenant.encode("utf-8", "surrogatepass"))
    _require(size <= MAX_TENANT_BYTES, "tenant", f"has {size} bytes, allowed are {MAX_TENANT_BYTES}")
    _require("\0" not in record.tenant, "tenant", "has a zero byte, which no database of keys can hold")
    _require(0 <= record.segment <= MAX_INT, "segment", f"{record.segment} is not from 0 to {MAX_INT}")
    _require(record.time_ms >= 0, "time_ms", f"{record.time_ms} is negative")
    version = record.snapshot_version
    _require(version is None or version >= 0, "snapshot_version", f"{version} is negative")
    reasons = (None, *(each.value for each in FinishReason))
    _require(record.finish_reason in reasons, "finish_reason", f"{record.finish_reason!r} is none of {reasons}")
    modes = get_args(Mode)
    _require(record.mode in modes, "mode", f"{record.mode!r} is none of {modes}")
    _require(0 <= record.seed < 1 << 64, "seed", f"{record.seed} is not an unsigned 64 bit number")
    weight = record.noise_weight
    _require(weight is None or 0 <= weight <= 1, "noise_weight", f"{weight} is not in [0, 1]")
    for name, row in ROWS.items():
        value, bounds = getattr(record, name), row.recorded or row.bounds
        is_off = value is None and getattr(DEFAULTS, name) is None
        _require(is_off or bounds.allow(value), name, f"{value} is not {bounds}")


def _check_ids(name: str, ids: np.ndarray) -> None:
    if len(ids):
        _require(int(ids.max()) <= MAX_ID, name, f"id {int(ids.max())} is negative or above {MAX_ID}")


def _check_length(name: str, column: np.ndarray, expected: int) -> None:
    _require(len(column) == expected, name, f"{len(column)} values, expected {expected}")


def _check_log_p(name: str, log_p: np.ndarray) -> None:
    _require(not np.isnan(log_p).any(), name, "holds NaN")
    _require(not (log_p > LOG_P_ROUNDING).any(), name, "holds a log-probability above 0")


def _check_logprobs(logprobs: TargetLogprobs, num_emitted: int) -> None:
    shape = logprobs.top_ids_EK.shape
    _require(shape[0] == num_emitted, "top_ids_EK", f"{shape[0]} rows, expected {num_emitted}")
    _require(1 <= shape[1] <= MAX_TOP_K, "top_ids_EK", f"{shape[1]} columns, allowed are 1 to {MAX_TOP_K}")
    _require(logprobs.top_log_p_EK.shape == shape, "top_log_p_EK", f"shape {logprobs.top_log_p_EK.shape}, not {shape}")
    _check_length("emitted_log_p_E", logprobs.emitted_log_p_E, num_emitted)
    _check_length("tail_log_p_E", logprobs.tail_log_p_E, num_emitted)
    _check_ids("top_ids_EK", logprobs.top_ids_EK.ravel())
    for name in ("top_log_p_EK", "emitted_log_p_E", "tail_log_p_E"):
        _check_log_p(name, getattr(logprobs, name))
    best_first = (logprobs.top_log_p_EK[:, 1:] <= logprobs.top_log_p_EK[:, :-1]).all()
    _require(bool(best_first), "top_log_p_EK", "a row does not fall from its most probable id on")


def _check_rounds(rounds: Rounds, num_emitted: int) -> None:
    num_rounds = len(rounds.num_nodes_R)
    for name in ("num_accepted_R", "num_emitted_R", "num_draft_ids_R", "draft_s_R", "target_s_R"):
        _check_length(name, getattr(rounds, name), num_rounds)
    total = int(rounds.num_emitted_R.sum(dtype=np.int64))
    if num_rounds:
        _require(total == num_emitted, "num_emitted_R", f"adds up to {total}, but {num_emitted} ids were emitted")
    _check_length("draft_ids_D", rounds.draft_ids_D, int(rounds.num_draft_ids_R.sum(dtype=np.int64)))
    _check_ids("draft_ids_D", rounds.draft_ids_D)
    for name in ("draft_s_R", "target_s_R"):
        seconds = getattr(rounds, name)
        _require(bool((np.isfinite(seconds) & (seconds >= 0)).all()), name, "holds a time that is not from 0 up")
    _check_nodes(rounds)


def _check_nodes(rounds: Rounds) -> None:
    """Check that every round is a tree: the parent of a node precedes it in the same round."""
    num_nodes_R = rounds.num_nodes_R.astype(np.int64)
    num_nodes = int(num_nodes_R.sum())
    for name in ("node_ids_M", "parents_M", "sources_M", "log_q_M", "accepted_M"):
        _check_length(name, getattr(rounds, name), num_nodes)
    _check_ids("node_ids_M", rounds.node_ids_M)
    _check_log_p("log_q_M", rounds.log_q_M)
    _require(not (rounds.sources_M >= len(SOURCES)).any(), "sources_M", f"holds a number above {len(SOURCES) - 1}")
    _require(not (rounds.accepted_M > 1).any(), "accepted_M", "holds a number above 1")
    starts_R = np.cumsum(num_nodes_R) - num_nodes_R
    index_M = np.arange(num_nodes) - np.repeat(starts_R, num_nodes_R) + 1
    _require(not (rounds.parents_M >= index_M).any(), "parents_M", "a parent does not stand before its child")
    num_before = np.concatenate(([0], np.cumsum(rounds.accepted_M, dtype=np.int64)))
    accepted_R = num_before[starts_R + num_nodes_R] - num_before[starts_R]
    is_equal = bool((accepted_R == rounds.num_accepted_R).all())
    _require(is_equal, "num_accepted_R", "does not count the accepted nodes of its rounds")
