"""The wire format of the trace topic: Avro, one message per trace record.

Columns of numbers are `bytes`, packed little-endian: plain Avro arrays decode 300 times slower. Shapes and
meanings are those of record.py, under the same names. Ids are vocabulary ids; log-probabilities natural logs.
Key: the request id, so one request stays in order in one partition. Headers: see codec.headers.
Evolution: a header names the version; any change of fields or of their meanings raises it, and a record of another
version is refused as unknown.
"""

from collections.abc import Mapping
from typing import Any

from omnidraft.params import DEFAULTS, ROWS

SCHEMA_NAME = "omnidraft.trace"
SCHEMA_VERSION = 1

ENCRYPTION = "encryption"
"""The header of a message whose value is encrypted."""
KEY_ID = "encryption_key_id"
"""The header with the opaque id of the tenant's key; without it the message is encrypted with a master key."""
FORGOTTEN = "forgotten"
"""The header of a message without content: its tenant was forgotten."""
MAX_PAYLOAD_BYTES = 1 << 20
"""Larger messages are refused before they are parsed."""
MAX_WRITTEN_BYTES = 1_000_000
"""Larger records are not written: with key and headers a message must stay below Kafka's default of 1 MiB."""
MAX_EMITTED = 4096
MAX_TOP_K = 1024
MAX_ID = (1 << 24) - 1
"""No vocabulary has as many ids; a negative id read as unsigned is larger."""
MAX_INT = (1 << 31) - 1
"""The largest `int` of Avro, whose readers do not check it and whose writers do."""

RECORD_COLUMNS: Mapping[str, str] = {
    "drafter_prompt_ids": "<u4",
    "prompt_ids": "<u4",
    "before_ids": "<u4",
    "emitted_ids": "<u4",
}
"""Column -> numpy type of its packed values."""

LOGPROB_COLUMNS: Mapping[str, str] = {
    "top_ids_EK": "<u4",
    "top_log_p_EK": "<f2",
    "emitted_log_p_E": "<f2",
    "tail_log_p_E": "<f2",
}

ROUND_COLUMNS: Mapping[str, str] = {
    "num_nodes_R": "<u2",
    "num_accepted_R": "<u2",
    "num_emitted_R": "<u2",
    "num_draft_ids_R": "<u2",
    "node_ids_M": "<u4",
    "parents_M": "<u2",
    "sources_M": "|u1",
    "log_q_M": "<f2",
    "accepted_M": "|u1",
    "draft_ids_D": "<u4",
    "draft_s_R": "<f4",
    "target_s_R": "<f4",
}

SEED_BYTES = 8


def _field(name: str, kind: Any, doc: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "doc": doc}


def _optional(name: str, kind: str, doc: str) -> dict[str, Any]:
    return {"name": name, "type": ["null", kind], "default": None, "doc": doc}


def _sampling(name: str) -> dict[str, Any]:
    row = ROWS[name]
    kind = "int" if row.bounds.is_integer else "double"
    return (_optional if getattr(DEFAULTS, name) is None else _field)(name, kind, row.doc)


def _columns(name: str, docs: Mapping[str, str]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [_field(column, "bytes", doc) for column, doc in docs.items()]}


_BELIEFS = _columns(
    "Beliefs",
    {
        "top_ids_EK": "uint32, row by row, most probable first; K is its length over that of emitted_ids",
        "top_log_p_EK": "float16, raw log-probability of each of them",
        "emitted_log_p_E": "float16, of the emitted token",
        "tail_log_p_E": "float16, log of the probability outside the K kept; -inf when nothing is",
    },
)

_ROUNDS = _columns(
    "Rounds",
    {
        "num_nodes_R": "uint16, drafted nodes of each target pass, the root not counted",
        "num_accepted_R": "uint16, nodes on the target's path",
        "num_emitted_R": "uint16, emitted tokens; they add up to those of the record",
        "num_draft_ids_R": "uint16, draft tokens sampled for the tree",
        "node_ids_M": "uint32, target ids of the drafted nodes, round after round",
        "parents_M": "uint16, index within the round's tree: 0 is the root, the first drafted node is 1",
        "sources_M": "uint8: 0 direct, 1 split, 2 merge, 3 lookup, 4 suffix, 5 forced",
        "log_q_M": "float16, the drafter's log-probability of the node given its parent",
        "accepted_M": "uint8, 1 for nodes on the target's path",
        "draft_ids_D": "uint32, draft tokens, round after round",
        "draft_s_R": "float32, seconds spent drafting",
        "target_s_R": "float32, seconds of the target pass",
    },
)

SCHEMA: Mapping[str, Any] = {
    "type": "record",
    "name": "TraceRecord",
    "namespace": "omnidraft",
    "doc": "What a worker tells the learner about a stretch of emitted tokens.",
    "fields": [
        _field("request_id", "string", "the same for all segments of a request"),
        _field("segment", "int", "0 for a request's first; (request_id, segment) names a record"),
        _field("time_ms", "long", "Unix milliseconds at which the segment ended"),
        _field("tenant", "string", "whose traffic"),
        _field("worker", "string", "which process"),
        _field("target", "string", "name of the target"),
        _field("drafter", "string", "name of the drafter"),
        _optional("snapshot_version", "long", "snapshot that drafted; null without a drafter"),
        _field("alignment", "string", "fingerprint of the vocabulary pair"),
        _field("drafter_prompt_ids", "bytes", "uint32, the prompt in the drafter's own template, as served"),
        _field("prompt_ids", "bytes", "uint32, the prompt in the target's ids"),
        _field("before_ids", "bytes", "uint32, target ids emitted before this segment, the newest of them"),
        _field("emitted_ids", "bytes", "uint32, target ids of this segment, at least one"),
        _field("beliefs", ["null", _BELIEFS], "null when the target gives no log-probabilities"),
        _field("rounds", _ROUNDS, "one entry per target pass"),
        _optional("finish_reason", "string", "stop or length when the answer ends here"),
        _field("mode", "string", "fast or reproducible"),
        *map(_sampling, ROWS),
        _field("seed", {"type": "fixed", "name": "Seed", "size": SEED_BYTES}, "unsigned 64 bit, little-endian"),
        _optional("traceparent", "string", "W3C trace context of the request"),
        _field("has_logit_bias", "boolean", "whether the client moved logits of single ids"),
        _field("has_grammar", "boolean", "whether the text had to match a grammar"),
        _optional("noise_weight", "double", "largest share of the target's noise that a guess looked at, from 0 to 1"),
        _field("has_settings", "boolean", "false: mode, temperature and all that shapes draws are unknown"),
    ],
}
