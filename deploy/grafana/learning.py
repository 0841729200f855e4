"""The dashboard of learning: trace records, the log, the learner and its snapshots."""

from panels import CHOSEN, Board, Panel, Query, Row, increase, quantiles, rate

from omnidraft.ports import DEAD_LETTER_REASONS

DEAD = f'{CHOSEN}, reason=~"{"|".join(DEAD_LETTER_REASONS)}"'
ALL = ""
EMITTED, ACKNOWLEDGED = "omnidraft_traces_emitted_total", "omnidraft_traces_acknowledged_total"
DROPPED, SKIPPED = "omnidraft_traces_dropped_total", "omnidraft_traces_skipped_total"

TRACES = Row(
    "Trace records",
    (
        Panel(
            "Records per second",
            "short",
            "Emitted by workers, acknowledged by the log, read by the learner.",
            (
                Query(rate(EMITTED, selector=ALL), "emitted"),
                Query(rate(ACKNOWLEDGED, selector=ALL), "acknowledged"),
                Query(rate("omnidraft_traces_read_total"), "read"),
            ),
        ),
        Panel(
            "Records that wait for the log",
            "short",
            "In the workers' memory; beyond recorder.queue_records they are dropped. More than a few: the log is away.",
            (Query(f"sum by (instance) ({EMITTED} - {ACKNOWLEDGED}) - sum by (instance) ({DROPPED})", "{{instance}}"),),
        ),
        Panel(
            "Records dropped by workers",
            "short",
            "Lost for learning; clients notice nothing.",
            (Query(increase(DROPPED, "reason", ALL), "{{reason}}"),),
        ),
        Panel(
            "Lag",
            "short",
            "Messages between the newest snapshot and the end of the log. Beyond learner.max_lag_records the learner "
            "goes on at the newest messages; Records skipped has the others as passed_over.",
            (Query(f"sum by (target) (omnidraft_log_lag_records{{{CHOSEN}}})", "{{target}}"),),
        ),
        Panel(
            "Dead letters",
            "short",
            "Records that could not be read, or that killed the learner: `omnidraft traces dead-letters list`.",
            (Query(increase(SKIPPED, "target, reason", DEAD), "{{target}} {{reason}}"),),
        ),
        Panel(
            "Records skipped",
            "short",
            "other_pair: records of another learner. passed_over: the learner lagged and went on at newer ones. "
            "over_share: its tenant had its share of the step.",
            (Query(increase(SKIPPED, "reason"), "{{reason}}"),),
        ),
    ),
)

LEARNER = Row(
    "Learner",
    (
        Panel(
            "Target tokens learned per second",
            "short",
            "",
            (Query(rate("omnidraft_training_tokens_total", "target"), "{{target}}"),),
        ),
        Panel(
            "Loss",
            "none",
            "Mean of the last step, by loss.",
            (Query(f"max by (target, loss) (omnidraft_training_loss{{{CHOSEN}}})", "{{target}} {{loss}}"),),
            minimum=None,
        ),
        Panel("Duration of a step", "s", "", quantiles("omnidraft_training_step_seconds", "target")),
        Panel(
            "Held-out agreement",
            "percentunit",
            "Of the newest snapshots, on records that nobody learns from.",
            (
                Query(
                    f"max by (target, drafter_version) (omnidraft_held_out_agreement_ratio{{{CHOSEN}}})",
                    "{{target}} {{drafter_version}}",
                ),
            ),
            maximum=1,
        ),
        Panel(
            "Steps and snapshots",
            "short",
            "",
            (
                Query(increase("omnidraft_training_steps_total", "target"), "steps {{target}}"),
                Query(increase("omnidraft_snapshots_published_total", "target"), "snapshots {{target}}"),
            ),
        ),
        Panel(
            "Memory",
            "bytes",
            "Resident, of the learner's process.",
            (Query(f'process_resident_memory_bytes{{job="omnidraft-distiller", {CHOSEN}}}', "{{target}}"),),
        ),
    ),
)

MEMORY = Row(
    "Fleet's memory",
    (
        Panel(
            "Tokens in memory",
            "short",
            "Of the newest snapshot, over all tenants (memory.total_tokens).",
            (Query(f"max by (target) (omnidraft_memory_tokens{{{CHOSEN}}})", "{{target}}"),),
        ),
        Panel(
            "Tenants with a memory",
            "short",
            "Groups count once (memory.max_tenants).",
            (Query(f"max by (target) (omnidraft_memory_tenants{{{CHOSEN}}})", "{{target}}"),),
        ),
        Panel(
            "Tokens dropped, and files left out",
            "short",
            "full: beyond a limit. Files that are damaged or whose keys are unknown serve nobody.",
            (
                Query(increase("omnidraft_memory_tokens_dropped_total", "reason"), "tokens {{reason}}"),
                Query(increase("omnidraft_memory_files_dropped_total", "reason"), "learner's files {{reason}}"),
                Query(increase("omnidraft_memory_files_unreadable_total", "reason"), "workers' files {{reason}}"),
            ),
        ),
    ),
)

VERSIONS = Row(
    "Snapshots",
    (
        Panel(
            "Versions over time",
            "none",
            "Published by the learner, champion of the controller, and what workers serve: the least and the most.",
            (
                Query(f"max by (target) (omnidraft_newest_version_info{{{CHOSEN}}})", "newest {{target}}"),
                Query(f"max by (target) (omnidraft_champion_version_info{{{CHOSEN}}})", "champion {{target}}"),
                Query(f"min by (target) (omnidraft_snapshot_version_info{{{CHOSEN}}})", "served, least {{target}}"),
                Query(f"max by (target) (omnidraft_snapshot_version_info{{{CHOSEN}}})", "served, most {{target}}"),
            ),
        ),
        Panel(
            "Judgements",
            "short",
            "What the controller did with challengers and champions.",
            (
                Query(increase("omnidraft_promotions_total", "target"), "promoted {{target}}"),
                Query(increase("omnidraft_refusals_total", "target"), "refused {{target}}"),
                Query(increase("omnidraft_rollbacks_total", "target"), "taken back {{target}}"),
            ),
        ),
        Panel(
            "Drift events",
            "short",
            "Falls of a tenant's agreement that were no noise, and their ends.",
            (
                Query(increase("omnidraft_drift_alarms_total", "target"), "began {{target}}"),
                Query(increase("omnidraft_drifts_over_total", "target"), "over {{target}}"),
            ),
        ),
        Panel("Loading a snapshot", "s", "Beside the old.", quantiles("omnidraft_snapshot_load_seconds", "target")),
        Panel("Swapping it in", "s", "Requests wait so long.", quantiles("omnidraft_snapshot_swap_seconds", "target")),
        Panel(
            "What did not answer",
            "short",
            "Times that log or registry failed a worker, the learner or the controller; failed loads and drafts; "
            "learners that wait for an operator's word about a log that was replaced.",
            (
                Query(increase("omnidraft_refresh_errors_total"), "worker"),
                Query(increase("omnidraft_learner_errors_total"), "learner"),
                Query(increase("omnidraft_controller_errors_total"), "controller"),
                Query(increase("omnidraft_snapshot_load_failures_total"), "loads that failed"),
                Query(increase("omnidraft_drafting_failures_total"), "drafts that failed"),
                Query("sum(omnidraft_learner_blocked_info)", "learners that wait"),
            ),
        ),
        Panel(
            "Refused signatures",
            "short",
            "Values of the control log that nobody of registry.trusted_keys signed, or old ones written again.",
            (
                Query(increase("omnidraft_control_messages_refused_total", "target"), "values for {{target}}"),
                Query(increase("omnidraft_champions_refused_total", "target"), "champions of {{target}}"),
            ),
        ),
    ),
)

LEARNING = Board(
    "omnidraft-learning",
    "omnidraft: learning",
    "Traces, lag, dead letters, steps, snapshots, versions and drift.",
    "omnidraft_training_steps_total",
    (TRACES, LEARNER, MEMORY, VERSIONS),
    (("drift", f"{increase('omnidraft_drift_alarms_total')} > 0"),),
)
