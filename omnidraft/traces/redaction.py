"""Redactors for `recorder.redactor`: what a record loses before it is written. Each keeps it sound for the learner.

A redactor of your own has the same form: TraceRecord in, TraceRecord out, or None for a record that nobody may see.
The learner needs `emitted_ids`, `before_ids`, `beliefs` and `rounds` as they are, and (request_id, segment) to name one
record only; `tenant` only to draw evenly over tenants, `drafter_prompt_ids` as context, `prompt_ids` not at all.
"""

import hashlib
from dataclasses import replace

import numpy as np

from omnidraft.traces.record import TraceRecord

_HASH_CHARACTERS = 16


def hashed_tenant(record: TraceRecord) -> TraceRecord:
    """A hash in place of the tenant's name; who knows the names can still tell them apart. Leaves out the worker's name
    and `traceparent`, which leads to other systems' records of the request."""
    name = hashlib.sha256(record.tenant.encode()).hexdigest()[:_HASH_CHARACTERS]
    return replace(record, tenant=name, worker="", traceparent=None)


def without_prompts(record: TraceRecord) -> TraceRecord:
    """The answer alone. Drafters learn less from it, because what was asked is no context of what was said."""
    nothing = np.array([], np.uint32)
    return replace(record, prompt_ids=nothing, drafter_prompt_ids=nothing)
