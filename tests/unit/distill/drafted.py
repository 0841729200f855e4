"""Records with drafts: chains that follow the emitted text for a while and then say something else."""

from dataclasses import replace

import numpy as np

from omnidraft.traces.record import SOURCES, Rounds, TraceRecord

RIGHT_LOG_Q, WRONG_LOG_Q = -0.25, -2.0


def with_drafts(pair, record: TraceRecord, *, seed: int = 0, are_right: bool | None = None) -> TraceRecord:
    """Each round drafts up to two emitted tokens, and then a wrong one, of which the drafter was less sure.

    Args:
        are_right: True leaves the wrong ones out, False the right ones.
    """
    draws = np.random.default_rng(seed)
    emitted = record.emitted_ids.tolist()
    rounds: list[tuple[list[int], int]] = []
    start = 0
    while start < len(emitted):
        num_right = min(0 if are_right is False else int(draws.integers(3)), len(emitted) - start - 1)
        wrong = [] if are_right else [int(draws.choice(np.setdiff1d(np.arange(3, 260), [emitted[start + num_right]])))]
        rounds.append(([*emitted[start : start + num_right], *wrong], num_right))
        start += num_right + 1
    return replace(record, rounds=_rounds(pair, rounds))


def _rounds(pair, chains: list[tuple[list[int], int]]) -> Rounds:
    nodes = [token for chain, _ in chains for token in chain]
    accepted = [index < num_right for chain, num_right in chains for index in range(len(chain))]
    kinds = ["direct" if len(pair.alignment.draft_pieces(token)) == 1 else "merge" for token in nodes]
    return Rounds(
        num_nodes_R=np.array([len(chain) for chain, _ in chains], np.uint16),
        num_accepted_R=np.array([num_right for _, num_right in chains], np.uint16),
        num_emitted_R=np.array([num_right + 1 for _, num_right in chains], np.uint16),
        num_draft_ids_R=np.zeros(len(chains), np.uint16),
        node_ids_M=np.array(nodes, np.uint32),
        parents_M=np.array([index for chain, _ in chains for index in range(len(chain))], np.uint16),
        sources_M=np.array([SOURCES.index(kind) for kind in kinds], np.uint8),
        log_q_M=np.where(accepted, RIGHT_LOG_Q, WRONG_LOG_Q).astype(np.float16),
        accepted_M=np.array(accepted, np.uint8),
        draft_ids_D=np.zeros(0, np.uint32),
        draft_s_R=np.zeros(len(chains), np.float32),
        target_s_R=np.zeros(len(chains), np.float32),
    )
