"""Redactors for `recorder.redactor`: they remove data from a record before it is written, and leave it valid for the
learner.

Your own redactor has the same signature: it takes a TraceRecord and returns one, or None if nobody may see it.
The learner needs `emitted_ids`, `before_ids`, `beliefs` and `rounds` as they are, and (request_id, segment) to name one
record only; `tenant` only to draw evenly over tenants, `drafter_prompt_ids` as context, `prompt_ids` not at all.
"""

import hashlib
from dataclasses import replace

import numpy as np

from omnidraft.traces.record import TraceRecord

_HASH_CHARACTERS = 16


def hashed_tenant(record: TraceRecord) -> TraceRecord:
    """Replace the tenant's name by a hash; whoever knows the names can recognise it. Remove the worker's name and
    `traceparent`, which leads to other systems' records of the request."""
    return replace(record, tenant=hash_of_tenant(record.tenant), worker="", traceparent=None)


def hash_of_tenant(tenant: str) -> str:
    """Return the name that `hashed_tenant` gives a tenant."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:_HASH_CHARACTERS]


def without_prompts(record: TraceRecord) -> TraceRecord:
    """Remove the prompts. Drafters learn less from such a record, because the context of the text is missing."""
    nothing = np.array([], np.uint32)
    return replace(record, prompt_ids=nothing, drafter_prompt_ids=nothing)
