"""The redactors remove what they name, and leave a record that a learner reads."""

import numpy as np

from omnidraft.distill.ingest.record_disposition import record_key
from omnidraft.traces import codec
from omnidraft.traces.redaction import hashed_tenant, without_prompts
from tests.trace_records import make_record


def test_a_hashed_tenant_is_the_same_for_all_its_records_and_another_for_others():
    first, again, other = (
        hashed_tenant(make_record(name, tenant=tenant))
        for name, tenant in [("a", "acme"), ("b", "acme"), ("c", "evil")]
    )
    assert first.tenant == again.tenant != other.tenant


def test_a_hashed_record_names_neither_tenant_nor_machine_nor_other_systems_records():
    payload = codec.encode(hashed_tenant(make_record(tenant="acme", worker="host-17")))
    assert b"acme" not in payload
    assert b"host-17" not in payload
    assert b"0af7651916cd43dd" not in payload
    assert "traceparent" not in codec.headers(hashed_tenant(make_record()))


def test_a_record_without_prompts_keeps_the_answer_and_its_name():
    record = make_record(before_ids=np.array([5, 6], np.uint32))
    stripped = without_prompts(record)
    read = codec.decode(codec.encode(stripped), codec.headers(stripped))
    assert (len(read.prompt_ids), len(read.drafter_prompt_ids)) == (0, 0)
    assert read.emitted_ids.tolist() == record.emitted_ids.tolist()
    assert read.before_ids.tolist() == [5, 6]
    assert record_key(read) == record_key(record)
