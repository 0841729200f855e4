"""Definitions of all metrics by the process that exposes them, with help texts and labels. They are counts: ratios are
for dashboards.

The values of a label are listed if they are known beforehand: such series begin at 0, so that the first event is an
increase. Values of `drafter_version` are kept for the newest versions only; see metrics.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from omnidraft.ports import DROP_REASONS, EXPIRED, FORGOTTEN, MEMORY_DROP_REASONS, SKIP_REASONS, UNREADABLE_REASONS

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
TOKENS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
RATIOS = tuple(tenth / 20 for tenth in range(21))

Values = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """The kind, help text and labels of one metric."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS
    values: Values = field(default_factory=dict)
    """Label -> its values, for labels whose values are known beforehand."""


def _counter(text: str, *labels: str, **values: tuple[str, ...]) -> MetricDefinition:
    return MetricDefinition("counter", text, labels, values=values)


def _gauge(text: str, *labels: str) -> MetricDefinition:
    return MetricDefinition("gauge", text, labels)


def _seconds(text: str, *labels: str) -> MetricDefinition:
    return MetricDefinition("histogram", text, labels)


_VERSION = ("target", "drafter_version")
_DRAFTED = (*_VERSION, "source")
_POSITION = (*_DRAFTED, "position")

GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
TOKENIZATION_PATHS = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")

COMMON: Mapping[str, MetricDefinition] = {
    "omnidraft_build_info": _gauge("1, with the version of the code.", "version"),
    "omnidraft_spans_ended_total": _counter("Spans that were put into the queue for the collector."),
    "omnidraft_spans_exported_total": _counter(
        "Spans that left the queue; failed: the collector did not take them.", "result", result=("ok", "failed")
    ),
    "omnidraft_control_messages_refused_total": _counter(
        "Control messages that nobody of registry.trusted_keys signed, or that were sent again.", "target"
    ),
    "omnidraft_champions_refused_total": _counter(
        "Champions of the registry that the signed control log does not name.", "target"
    ),
}

WORKER: Mapping[str, MetricDefinition] = {
    "omnidraft_http_responses_total": _counter(
        "Responses by their status code; 499: the client went away before the first byte.",
        "path",
        "code",
        path=GENERATION_PATHS,
        code=("200", "400", "429", "499", "500", "503"),
    ),
    "omnidraft_http_request_seconds": _seconds("From a request's first byte to its response's last.", "path"),
    "omnidraft_requests_total": _counter("Finished requests.", "status", "target", status=("ok", "abandoned")),
    "omnidraft_requests_waiting": _gauge("Requests that wait for the target.", "target"),
    "omnidraft_requests_running": _gauge("Requests that are decoded, together.", "target"),
    "omnidraft_preemptions_total": _counter("Texts that gave up their keys for others and went on later.", "target"),
    "omnidraft_prefix_cache_queries_total": _counter("Prompt tokens of requests that began.", "target"),
    "omnidraft_prefix_cache_hits_total": _counter("... whose keys were those of an earlier text.", "target"),
    "omnidraft_emitted_tokens_total": _counter("Tokens shown to clients.", *_VERSION),
    "omnidraft_target_passes_total": _counter("Passes of the target.", *_VERSION),
    "omnidraft_decode_seconds_total": _counter(
        "Time spent on passes: part is draft, target, or other for translation and bookkeeping.", *_VERSION, "part"
    ),
    "omnidraft_plain_decode_seconds_total": _counter(
        "Time that the same tokens would have taken without drafting, by what a plain pass takes here.", *_VERSION
    ),
    "omnidraft_time_to_first_token_seconds": _seconds("From a request's arrival to its first token.", "target"),
    "omnidraft_inter_token_latency_seconds": _seconds("Between two tokens of an answer.", "target"),
    "omnidraft_spec_decode_num_drafts_total": _counter("Trees scored.", *_DRAFTED),
    "omnidraft_spec_decode_num_draft_tokens_total": _counter("Drafted nodes scored.", *_DRAFTED),
    "omnidraft_spec_decode_num_accepted_tokens_total": _counter("Drafted nodes on the path.", *_DRAFTED),
    "omnidraft_spec_decode_num_accepted_tokens_per_pos_total": _counter("Nodes on the path, by depth.", *_POSITION),
    "omnidraft_spec_decode_accepted_tokens_per_pass": MetricDefinition(
        "histogram", "Nodes on the path of one pass.", _VERSION, TOKENS
    ),
    "omnidraft_drafting_failures_total": _counter("Exceptions while drafting, which ended no text.", "target"),
    "omnidraft_scored_positions_total": _counter(
        "Positions where something was drafted, by depth and source of the first-ranked candidate.", *_POSITION
    ),
    "omnidraft_agreed_positions_total": _counter("... and the target drew that candidate.", *_POSITION),
    "omnidraft_agreement_ratio": MetricDefinition("histogram", "Agreement of a request.", ("target",), RATIOS),
    "omnidraft_traces_emitted_total": _counter("Trace records handed to the recorder."),
    "omnidraft_traces_dropped_total": _counter(
        "Trace records that never reached the log.", "reason", reason=DROP_REASONS
    ),
    "omnidraft_traces_acknowledged_total": _counter("Trace records the log has acknowledged."),
    "omnidraft_snapshot_version_info": _gauge("Snapshot in place.", "target", "drafter"),
    "omnidraft_snapshot_swap_seconds": _seconds("How long a swap held up requests.", "target"),
    "omnidraft_snapshot_load_seconds": _seconds("Staging and loading a snapshot, beside the old one.", "target"),
    "omnidraft_snapshot_load_failures_total": _counter("Snapshots that could not be put in place.", "target"),
    "omnidraft_refresh_errors_total": _counter("Times log or registry did not answer a worker.", "target"),
    "omnidraft_memory_files_unreadable_total": _counter(
        "Files of the fleet's memory that were left out when a snapshot was loaded.",
        "reason",
        "target",
        reason=UNREADABLE_REASONS,
    ),
}

DISTILLER: Mapping[str, MetricDefinition] = {
    "omnidraft_traces_read_total": _counter("Trace records read by the learner.", "target"),
    "omnidraft_traces_skipped_total": _counter(
        "Trace records not learned from; expired: messages that the log had deleted by then.",
        "reason",
        "target",
        reason=SKIP_REASONS,
    ),
    "omnidraft_kept_records_dropped_total": _counter(
        "Records dropped from the held-out set and the replay buffer: too old, or of a forgotten tenant.",
        "reason",
        "target",
        reason=(EXPIRED, FORGOTTEN),
    ),
    "omnidraft_log_lag_records": _gauge("Records between the learner and the end of the log.", "partition", "target"),
    "omnidraft_training_steps_total": _counter("Steps of the learner.", "target"),
    "omnidraft_training_tokens_total": _counter("Target tokens learned from.", "target"),
    "omnidraft_training_loss": _gauge("Mean loss of the last step.", "loss", "target"),
    "omnidraft_training_step_seconds": _seconds("Duration of a step of the learner.", "target"),
    "omnidraft_held_out_agreement_ratio": _gauge("Agreement on held-out records.", "drafter_version", "target"),
    "omnidraft_snapshots_published_total": _counter("Snapshots published.", "target"),
    "omnidraft_newest_version_info": _gauge("Newest snapshot of this learner.", "target"),
    "omnidraft_learner_blocked_info": _gauge(
        "1 while learning stands still until an operator decides about the log, else 0.", "target"
    ),
    "omnidraft_learner_errors_total": _counter("Times log or registry did not answer the learner.", "target"),
    "omnidraft_memory_tokens": _gauge("Tokens in the newest snapshot's memory.", "target"),
    "omnidraft_memory_tenants": _gauge("Tenants and groups that have a memory there.", "target"),
    "omnidraft_memory_tokens_dropped_total": _counter(
        "Tokens dropped from the memory; full: the oldest, beyond a limit.",
        "reason",
        "target",
        reason=MEMORY_DROP_REASONS,
    ),
    "omnidraft_memory_files_dropped_total": _counter(
        "Files of the memory that were left out when learning went on from a snapshot.",
        "reason",
        "target",
        reason=UNREADABLE_REASONS,
    ),
}

PROPOSER: Mapping[str, MetricDefinition] = {
    "omnidraft_followed_texts": _gauge("Texts that a proposer inside another engine remembers.", "target"),
    "omnidraft_drafter_ids": _gauge("Ids whose keys the drafter holds there.", "target"),
}
"""In addition to the worker's."""

CONTROLLER: Mapping[str, MetricDefinition] = {
    "omnidraft_champion_version_info": _gauge("Champion that was announced last.", "target"),
    "omnidraft_promotions_total": _counter("Challengers that became champion.", "target"),
    "omnidraft_refusals_total": _counter("Challengers that were not promoted.", "target"),
    "omnidraft_rollbacks_total": _counter("Champions that were taken back.", "target"),
    "omnidraft_drift_alarms_total": _counter("Falls of agreement that were no noise.", "target"),
    "omnidraft_drifts_over_total": _counter("Falls of agreement that are over.", "target"),
    "omnidraft_controller_errors_total": _counter("Times log or registry did not answer the controller.", "target"),
}

DEFINITIONS: Mapping[str, MetricDefinition] = {**COMMON, **WORKER, **PROPOSER, **DISTILLER, **CONTROLLER}
"""Name -> definition. The name of a counter ends in _total."""
