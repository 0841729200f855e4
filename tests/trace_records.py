"""Trace records for tests: every field filled, every array consistent, any size."""

from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np

from omnidraft.traces.record import Rounds, TargetLogprobs, TraceRecord
from omnidraft.traces.request_ids import request_of


def make_record(
    request_id: str = "request-1", *, num_emitted: int = 6, num_kept: int = 4, **fields: Any
) -> TraceRecord:
    """Rounds of two drafted nodes, the first of them accepted, which emit two tokens each; each request has a prompt of
    its own."""
    rng = np.random.default_rng(num_emitted * 1000 + num_kept)
    num_rounds, own = (num_emitted + 1) // 2, crc32(request_of(request_id).encode(errors="surrogatepass"))
    record = TraceRecord(
        request_id=request_id,
        segment=0,
        time_ms=1_764_000_000_000,
        tenant="default",
        worker="worker-1",
        target="target",
        drafter="drafter",
        snapshot_version=7,
        alignment="aligned",
        drafter_prompt_ids=rng.integers(0, 49_152, 9, dtype=np.uint32),
        prompt_ids=np.random.default_rng(own).integers(0, 151_936, 8, dtype=np.uint32),
        before_ids=np.array([], np.uint32),
        emitted_ids=rng.integers(0, 151_936, num_emitted, dtype=np.uint32),
        beliefs=make_beliefs(rng, num_emitted, num_kept),
        rounds=make_rounds(rng, num_rounds, num_emitted),
        finish_reason="stop",
        mode="reproducible",
        temperature=0.7,
        top_k=None,
        top_p=0.95,
        seed=(1 << 64) - 1,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    return replace(record, **fields)


def make_beliefs(rng: np.random.Generator, num_emitted: int, num_kept: int) -> TargetLogprobs:
    log_p_EK = -np.sort(rng.exponential(3.0, (num_emitted, num_kept)), axis=1)
    return TargetLogprobs(
        top_ids_EK=rng.integers(0, 151_936, (num_emitted, num_kept), dtype=np.uint32),
        top_log_p_EK=log_p_EK.astype(np.float16),
        emitted_log_p_E=log_p_EK[:, 0].astype(np.float16),
        tail_log_p_E=np.full(num_emitted, -np.inf, np.float16),
    )


def make_rounds(rng: np.random.Generator, num_rounds: int, num_emitted: int) -> Rounds:
    num_emitted_R = np.full(num_rounds, 2, np.uint16)
    num_emitted_R[-1] -= num_emitted % 2
    return Rounds(
        num_nodes_R=np.full(num_rounds, 2, np.uint16),
        num_accepted_R=np.ones(num_rounds, np.uint16),
        num_emitted_R=num_emitted_R,
        num_draft_ids_R=np.full(num_rounds, 3, np.uint16),
        node_ids_M=rng.integers(0, 151_936, 2 * num_rounds, dtype=np.uint32),
        parents_M=np.tile(np.array([0, 1], np.uint16), num_rounds),
        sources_M=rng.integers(0, 4, 2 * num_rounds, dtype=np.uint8),
        log_q_M=-rng.exponential(1.0, 2 * num_rounds).astype(np.float16),
        accepted_M=np.tile(np.array([1, 0], np.uint8), num_rounds),
        draft_ids_D=rng.integers(0, 49_152, 3 * num_rounds, dtype=np.uint32),
        draft_s_R=np.full(num_rounds, 0.05, np.float32),
        target_s_R=np.full(num_rounds, 0.18, np.float32),
    )
