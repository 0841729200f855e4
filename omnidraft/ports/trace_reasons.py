"""Reasons why a trace record was not written or not learned from.

The values are stored: in the metric label `reason`, in manifests and in the header `reason` of dead letters.
"""

from typing import Literal, get_args

from omnidraft.ports.log import DamageReason

DropReason = Literal["queue_full", "closed", "invalid", "too_large", "redacted", "redactor_failed"]
"""The worker did not write the record."""
RejectReason = Literal["unknown_schema", "unknown_key", "other_alignment", "unreadable"]
"""The distiller read a whole message and cannot learn from it."""
POISON = "poison"
"""The record is sound, but the learner's process died over it again and again."""
OTHER_PAIR = "other_pair"
"""The record is sound, and another distiller learns from it."""
SAMPLED_OUT = "sampled_out"
"""The record is sound, and a learner that lagged passed over it."""
EXPIRED = "expired"
"""The log deleted the message before it was read."""

DROP_REASONS: tuple[str, ...] = get_args(DropReason)
REJECT_REASONS: tuple[str, ...] = get_args(RejectReason)
DEAD_LETTER_REASONS = (*REJECT_REASONS, *get_args(DamageReason), POISON)
SKIP_REASONS = (*DEAD_LETTER_REASONS, OTHER_PAIR, SAMPLED_OUT, EXPIRED)
