"""One pass of the target over the rows of several sequences."""

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from traceback import clear_frames

import torch

from omnidraft.decode.policy.cost_measurement import wait_for
from omnidraft.decode.sequence import SequenceState
from omnidraft.ports import DraftTree, Target

logger = logging.getLogger(__name__)

_MAX_KINDS = 64
"""Kinds of failures that are logged at most."""
_told: set[str] = set()
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
    failure = ""
    try:
        _forward(target, trees, prompts, result)
    except Exception as exc:  # found out below whose it is
        result.has_failed = True
        clear_frames(exc.__traceback__)  # they hold the tensors of the pass, whose memory the next one needs
        if len(sequences) == 1:
            result.errors[sequences[0]] = exc
        else:
            failure = f"{type(exc).__name__}: {exc}"
    if failure:
        alone = [run_pass(target, [each], []) for each in trees] + [run_pass(target, [], [each]) for each in prompts]
        result.logits = {sequence: logits for each in alone for sequence, logits in each.logits.items()}
        result.errors = {sequence: error for each in alone for sequence, error in each.errors.items()}
        if not result.errors:
            _warn_once(failure)
    result.seconds = time.perf_counter() - started_s
    return result


def _warn_once(failure: str) -> None:
    """Log a kind of failure when it is new: two whose messages differ in numbers alone, as of bytes, are one."""
    kind = _NUMBERS.sub("#", failure)
    if kind not in _told and len(_told) < _MAX_KINDS:
        _told.add(kind)
        logger.warning("texts are computed one by one, as the target cannot compute several in a pass: %s", failure)


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
