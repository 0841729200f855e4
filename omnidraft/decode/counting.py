"""What a step adds to the counters of speculation."""

from functools import partial

from omnidraft.ports import Metrics, Step

_PREFIX = "omnidraft_spec_decode_num_"


def count_step(metrics: Metrics, step: Step, target: str, drafter_version: str) -> None:
    """Passes, emitted tokens, and drafted and accepted ones by their source."""
    add = partial(metrics.add, target=target, drafter_version=drafter_version)
    add("omnidraft_target_passes_total")
    add("omnidraft_emitted_tokens_total", len(step.emitted))
    for source in sorted({source for source in step.tree.sources if source}):
        nodes = [node for node in range(1, len(step.tree)) if step.tree.sources[node] == source]
        accepted = [node for node in step.path if step.tree.sources[node] == source]
        add(_PREFIX + "drafts_total", source=source)
        add(_PREFIX + "draft_tokens_total", len(nodes), source=source)
        add(_PREFIX + "accepted_tokens_total", len(accepted), source=source)
    for depth, node in enumerate(step.path):
        source_name = str(step.tree.sources[node])
        add(_PREFIX + "accepted_tokens_per_pos_total", source=source_name, position=str(depth))
