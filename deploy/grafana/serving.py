"""The dashboard of serving: speed-up, agreement, requests and workers."""

from panels import CHOSEN, WINDOW, Board, Panel, Query, Row, increase, quantiles, rate, share

from omnidraft.telemetry.metric_definitions import GENERATION_PATHS

PLAIN, SPENT = "omnidraft_plain_decode_seconds_total", "omnidraft_decode_seconds_total"
EMITTED, PASSES = "omnidraft_emitted_tokens_total", "omnidraft_target_passes_total"
SCORED, AGREED = "omnidraft_scored_positions_total", "omnidraft_agreed_positions_total"
DRAFTED, ACCEPTED = "omnidraft_spec_decode_num_draft_tokens_total", "omnidraft_spec_decode_num_accepted_tokens_total"
ON_PATH, TREES = "omnidraft_spec_decode_num_accepted_tokens_per_pos_total", "omnidraft_spec_decode_num_drafts_total"
WORKERS = 'job="omnidraft-worker"'
GENERATION = f'{WORKERS}, path=~"{"|".join(GENERATION_PATHS)}"'

SPEED = Row(
    "What drafting brings",
    (
        Panel(
            "Speed-up",
            "none",
            "Time that plain decoding would have taken for the same tokens, by what a plain pass takes on that worker, "
            "over the time that was spent. 1 is the break-even.",
            (Query(share(PLAIN, SPENT, "target"), "{{target}}"),),
            threshold=1,
        ),
        Panel(
            "Speed-up by snapshot",
            "none",
            "The same for each drafter version: what learning brings, and what a canary would.",
            (Query(share(PLAIN, SPENT, "target, drafter_version"), "{{target}} {{drafter_version}}"),),
            threshold=1,
        ),
        Panel(
            "Tokens per target pass",
            "none",
            "Block efficiency; 1 is plain decoding.",
            (Query(share(EMITTED, PASSES, "target"), "{{target}}"),),
        ),
        Panel("Tokens per second", "short", "Of the fleet.", (Query(rate(EMITTED, "target"), "{{target}}"),)),
        Panel(
            "Where decoding's time goes",
            "percentunit",
            "The drafter's computing, the target's, and translation with bookkeeping.",
            (Query(f"{rate(SPENT, 'part')} / ignoring(part) group_left {rate(SPENT)}", "{{part}}"),),
            maximum=1,
        ),
        Panel(
            "Drafted tokens per pass",
            "none",
            "By source; nothing means that drafting does not pay, or is off.",
            (Query(f"{rate(DRAFTED, 'source')} / ignoring(source) group_left {rate(PASSES)}", "{{source}}"),),
        ),
    ),
)

AGREEMENT = Row(
    "Agreement",
    (
        Panel(
            "Agreement",
            "percentunit",
            "Share of scored positions whose first-ranked candidate is the token that the target drew.",
            (Query(share(AGREED, SCORED, "target"), "{{target}}"),),
            maximum=1,
        ),
        Panel(
            "Agreement by source",
            "percentunit",
            "direct: one draft token is one target token. split: one is several. merge: several are one, from the "
            "n-gram cache. lookup: copied from earlier in the text. suffix: followed the same tokens in this text "
            "or in an earlier one of the tenant. forced: the only token that the grammar allows.",
            (Query(share(AGREED, SCORED, "source"), "{{source}}"),),
            maximum=1,
        ),
        Panel(
            "Agreement by depth",
            "percentunit",
            "Of the drafted path's first token (0), second (1), and so on, where the path reached it.",
            (Query(share(AGREED, SCORED, "position"), "depth {{position}}"),),
            maximum=1,
        ),
        Panel(
            "Agreement by snapshot",
            "percentunit",
            "As clients met it; compare with the held-out agreement under learning.",
            (Query(share(AGREED, SCORED, "target, drafter_version"), "{{target}} {{drafter_version}}"),),
            maximum=1,
        ),
        Panel(
            "Drafted tokens accepted, by source",
            "percentunit",
            "Of all drafted nodes, siblings included: what vLLM calls the acceptance rate.",
            (Query(share(ACCEPTED, DRAFTED, "source"), "{{source}}"),),
            maximum=1,
        ),
        Panel(
            "Paths that reach a depth",
            "percentunit",
            "Share of the trees whose path goes through a drafted node of this depth.",
            (Query(f"{rate(ON_PATH, 'position')} / ignoring(position) group_left {rate(TREES)}", "{{position}}"),),
        ),
    ),
)

REQUESTS = Row(
    "Requests",
    (
        Panel(
            "Finished requests per second",
            "reqps",
            "By how they ended.",
            (Query(rate("omnidraft_requests_total", "status"), "{{status}}"),),
        ),
        Panel(
            "Requests that wait",
            "short",
            "For the target; worker.max_queue of them at most in each worker, then clients get 429.",
            (Query(f"sum by (target) (omnidraft_requests_waiting{{{CHOSEN}}})", "{{target}}"),),
        ),
        Panel(
            "Requests decoded together",
            "short",
            "Up to scheduler.max_num_seqs texts of each target.",
            (Query(f"sum by (target) (omnidraft_requests_running{{{CHOSEN}}})", "{{target}}"),),
        ),
        Panel(
            "Prompt tokens that were not read again",
            "percentunit",
            "Their keys were those of an earlier text of the same client.",
            (
                Query(
                    share("omnidraft_prefix_cache_hits_total", "omnidraft_prefix_cache_queries_total", "target"),
                    "{{target}}",
                ),
            ),
            maximum=1,
        ),
        Panel(
            "Preempted texts per second",
            "ops",
            "Texts that gave up their keys and went on later: scheduler.kv_cache_gib is too small for the traffic, or "
            "a client with many texts made way for others.",
            (Query(rate("omnidraft_preemptions_total", "target"), "{{target}}"),),
        ),
        Panel(
            "Responses by status code",
            "reqps",
            "429: the queue was full. 499: the client went away before the first byte.",
            (Query(rate("omnidraft_http_responses_total", "code", WORKERS), "{{code}}"),),
        ),
        Panel("Time to first token", "s", "", quantiles("omnidraft_time_to_first_token_seconds")),
        Panel(
            "Between two tokens",
            "s",
            "The tokens of one pass come together; its time is divided among them.",
            quantiles("omnidraft_inter_token_latency_seconds"),
        ),
        Panel(
            "Duration of requests",
            "s",
            "From the first byte of the request to the last of the response.",
            quantiles("omnidraft_http_request_seconds", selector=GENERATION),
        ),
    ),
)

WORKER = Row(
    "Workers",
    (
        Panel("Up", "none", "1: Prometheus reached it.", (Query(f"up{{{WORKERS}}}", "{{instance}}"),), threshold=1),
        Panel("Memory", "bytes", "Resident.", (Query(f"process_resident_memory_bytes{{{WORKERS}}}", "{{instance}}"),)),
        Panel(
            "Processor cores in use",
            "short",
            "",
            (Query(f"rate(process_cpu_seconds_total{{{WORKERS}}}{WINDOW})", "{{instance}}"),),
        ),
    ),
)

SERVING = Board(
    "omnidraft-serving",
    "omnidraft: serving",
    "Speed-up, agreement, queue and latencies of the decode workers.",
    "omnidraft_target_passes_total",
    (SPEED, AGREEMENT, REQUESTS, WORKER),
    (("drift", f"{increase('omnidraft_drift_alarms_total')} > 0"),),
)
