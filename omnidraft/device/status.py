"""What learning on the device has come to, for its user."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from omnidraft.fleet.promotion import lineage_to
from omnidraft.ports import SnapshotVersion


@dataclass(frozen=True, slots=True)
class Progress:
    """The agreement of the drafter that serves, beside that of the drafter that learning began with."""

    before: float | None
    """The share of held-out tokens that the drafter as it came would have drafted rightly: `after` less the changes of
    all snapshots since, each measured before and after on the same records. None before anything was measured."""
    after: float | None
    """The same of the drafter that serves."""
    gain_error: float | None
    """The standard error of the gain, after - before; None while too few requests are held out to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningStatus:
    """The state of learning at one moment."""

    problem: str | None
    """Why nothing is learned any more, or what has to be decided before it goes on; None: all is well."""
    num_recorded: int
    """Records in the log, ever: a request with an answer of up to 256 tokens is one."""
    num_learned: int
    num_waiting: int
    """Records that were neither learned nor held out yet."""
    num_tokens: int
    """Tokens of the target learned."""
    num_steps: int
    newest_version: int | None
    """The snapshot published last; None before the first."""
    serving_version: int | None
    """The snapshot that drafts; None is the drafter as it came."""
    agreement: Progress
    cpu_s: float
    """Processor seconds that this process spent on learning; with `learner.threads` above one, on its first thread."""
    longest_overlap_s: float
    """The longest time for which learning went on beside a request that had just come."""


def progress_of(versions: Sequence[SnapshotVersion]) -> Progress:
    """Return the progress from the first of these versions to the champion."""
    champion = next((each.manifest for each in versions if "champion" in each.aliases), None)
    if champion is None or champion.agreement_after is None:
        return Progress(None, None, None)
    lineage = lineage_to(versions, champion, len(versions))
    changes = [
        (each.agreement_after - each.agreement_before, each.agreement_change_error)
        for each in lineage
        if each.agreement_before is not None and each.agreement_after is not None
    ]
    errors = [error for _, error in changes if error is not None]
    is_known = len(errors) == len(changes)
    return Progress(
        champion.agreement_after - sum(change for change, _ in changes),
        champion.agreement_after,
        sqrt(sum(error**2 for error in errors)) if is_known else None,
    )
