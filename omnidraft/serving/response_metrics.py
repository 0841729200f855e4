"""vLLM's `metrics` of a response: the times of one text, and how many of its drafted tokens were accepted.

AIPerf and GuideLLM read it from every response of one choice, and from the last chunk of a stream that has the usage.
Source: https://docs.vllm.ai/en/v0.32.0/features/speculative_decoding/acceptance_metrics/
"""

from omnidraft.decode.step_stats import DecodeStats
from omnidraft.serving.response_schemas import ResponseMetrics, SpeculativeDecodingMetrics


def response_metrics(stats: DecodeStats) -> ResponseMetrics:
    """Return the metrics of one text that has ended."""
    first_token_s = stats.first_token_s - stats.queue_s
    spent_s = first_token_s + stats.decode_s
    num_gaps = stats.num_tokens - 1
    return ResponseMetrics(
        time_to_first_token_ms=1000 * first_token_s,
        generation_time_ms=1000 * stats.decode_s,
        queue_time_ms=1000 * stats.queue_s,
        mean_itl_ms=1000 * stats.decode_s / num_gaps if num_gaps > 0 else None,
        tokens_per_second=stats.num_tokens / spent_s if spent_s > 0 else None,
        speculative_decoding=_acceptance(stats),
    )


def _acceptance(stats: DecodeStats) -> SpeculativeDecodingMetrics:
    drafted, accepted = stats.drafted_per_pass, stats.accepted_per_pass
    num_spec_tokens, num_steps = max(drafted, default=0), stats.num_passes - drafted[0]
    histogram = [accepted[count] for count in range(num_spec_tokens + 1)]
    histogram[0] -= drafted[0]  # passes without drafts accept nothing, and are no steps
    num_accepted = sum(count * times for count, times in enumerate(histogram))
    num_drafted = sum(count * times for count, times in drafted.items())
    return SpeculativeDecodingMetrics(
        mean_acceptance_length=1 + num_accepted / num_steps if num_steps else 1.0,
        draft_acceptance_rate=num_accepted / num_drafted if num_drafted else 0.0,
        acceptance_histogram=histogram,
        num_spec_steps=num_steps,
        num_accepted_draft_tokens=num_accepted,
        num_draft_tokens=num_drafted,
        num_spec_tokens=num_spec_tokens,
    )
