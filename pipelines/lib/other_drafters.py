"""Recorded answers that another drafter's worker recorded, for this drafter: the target's part stays as it is.

A record has the prompt in its drafter's own ids, which mean other text to a drafter with another vocabulary.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from omnidraft.assembly.drafting import drafter_prompt
from omnidraft.errors import RequestError
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from omnidraft.vocab.retokenise import retokenise

if TYPE_CHECKING:
    from omnidraft.assembly.models import Vocabularies

_ANY_LENGTH = 2**31
"""A learner cuts a prompt to its drafter's context itself."""


def for_drafter(
    records: Iterable[TraceRecord], target: str, drafter: str, tokenizers: "Vocabularies"
) -> list[TraceRecord]:
    """Return the records as this drafter's worker would have recorded them, without what the other one drafted.

    Raises:
        RequestError: they are another target's answers.
    """
    alignment, own = tokenizers.alignment.fingerprint, []
    for record in records:
        if record.target != target:
            raise RequestError(f"the archive has answers of {record.target}, not of {target}; name it with --target")
        own.append(record if record.alignment == alignment else _adopted(record, drafter, tokenizers))
    return own


def _adopted(record: TraceRecord, drafter: str, tokenizers: "Vocabularies") -> TraceRecord:
    ids, rest = drafter_prompt(record.prompt_ids.tolist(), tokenizers, _ANY_LENGTH)
    tail = retokenise(rest, tokenizers.target.vocabulary, tokenizers.drafter, tokenizers.alignment)
    return replace(
        record,
        drafter=drafter,
        alignment=tokenizers.alignment.fingerprint,
        snapshot_version=None,
        drafter_prompt_ids=np.array([*ids, *tail], np.uint32),
        rounds=codec.no_rounds(),
        noise_weight=None,
    )
