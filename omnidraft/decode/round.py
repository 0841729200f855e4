"""One pass of the target over the rows of several sequences."""

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from traceback import clear_frames

import torch

from omnidraft.decode.policy.cost_measurement import wait_for
from omnidraft.decode.sequence import SequenceState
from omnidraft.ports import DraftTree, Target

logger = logging.getLogger(__name__)

_MAX_KINDS = 64
"""Kinds of failures that are remembered as told."""
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|[\d.]+")


@dataclass(slots=True)
class PassResult:
    """The logits [N, V] of each tree, the errors of sequences that the target could not compute, and the duration."""

    logits: dict[SequenceState, torch.Tensor] = field(default_factory=dict)
    errors: dict[SequenceState, Exception] = field(default_factory=dict)
    seconds: float = 0.0
    has_failed: bool = False
    """Whether the pass raised: `seconds` holds the failed attempt too, and the passes over each sequence alone."""


def run_pass(
    target: Target,
    trees: Sequence[tuple[SequenceState, DraftTree]],
    prompts: Sequence[tuple[SequenceState, int]],
) -> PassResult:
    """Score these trees and read so many prompt ids of the other sequences; an error ends only the sequence that raises
    it: where a pass over several fails, each is computed alone."""
    result, started_s = PassResult(), time.perf_counter()
    sequences = [each for each, _ in (*trees, *prompts)]
    failure: _Failure | None = None
    try:
        _forward(target, trees, prompts, result)
    except Exception as exc:  # found out below whose it is
        result.has_failed = True
        clear_frames(exc.__traceback__)  # they hold the tensors of the pass, whose memory the next one needs
        if len(sequences) == 1:
            result.errors[sequences[0]] = exc
        else:
            failure = _Failure.of(exc)
    if failure is not None:
        alone = [run_pass(target, [each], []) for each in trees] + [run_pass(target, [], [each]) for each in prompts]
        result.logits = {sequence: logits for each in alone for sequence, logits in each.logits.items()}
        result.errors = {sequence: error for each in alone for sequence, error in each.errors.items()}
        if not result.errors:
            _warn_once(failure)
    result.seconds = time.perf_counter() - started_s
    return result


@dataclass(frozen=True, slots=True)
class _Failure:
    """The error that a pass raised. Two of one type whose messages differ in numbers alone are equal, since
    a message may count bytes."""

    type_name: str
    wording: str
    """The message without its numbers."""
    message: str = field(compare=False)

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        message = str(error)
        return cls(type(error).__name__, _NUMBERS.sub("#", message), message)


@lru_cache(_MAX_KINDS)
def _warn_once(failure: _Failure) -> None:
    logger.warning(
        "texts are computed one by one, as the target cannot compute several in a pass: %s: %s",
        failure.type_name,
        failure.message,
    )


def _forward(
    target: Target,
    trees: Sequence[tuple[SequenceState, DraftTree]],
    prompts: Sequence[tuple[SequenceState, int]],
    result: PassResult,
) -> None:
    if not trees and not prompts:
        return
    scored = [(sequence.open_session, tree) for sequence, tree in trees]
    read = [(each.open_session, min(num_ids, each.num_unread)) for each, num_ids in prompts if each.num_unread]
    logits = target.forward(scored, read)
    wait_for(logits)
    result.logits = {sequence: each for (sequence, _), each in zip(trees, logits, strict=True)}
