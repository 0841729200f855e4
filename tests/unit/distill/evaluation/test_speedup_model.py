"""Step times from the rounds of records, whoever drafted in them."""

from dataclasses import replace

import numpy as np
import pytest

from omnidraft.distill.evaluation import speedup_model
from omnidraft.traces.record import SOURCES, Rounds, Source, TraceRecord
from tests.trace_records import make_record

NUM = speedup_model.MIN_ROUNDS + 10


def drafted(parents: list[int], sources: list[Source], draft_s: float) -> TraceRecord:
    """A record of NUM rounds with this tree, all of which the target refused."""
    num_nodes = len(parents)
    rounds = Rounds(
        num_nodes_R=np.full(NUM, num_nodes, np.uint16),
        num_accepted_R=np.zeros(NUM, np.uint16),
        num_emitted_R=np.ones(NUM, np.uint16),
        num_draft_ids_R=np.zeros(NUM, np.uint16),
        node_ids_M=np.ones(NUM * num_nodes, np.uint32),
        parents_M=np.tile(np.array(parents, np.uint16), NUM),
        sources_M=np.tile(np.array([SOURCES.index(each) for each in sources], np.uint8), NUM),
        log_q_M=np.zeros(NUM * num_nodes, np.float16),
        accepted_M=np.zeros(NUM * num_nodes, np.uint8),
        draft_ids_D=np.array([], np.uint32),
        draft_s_R=np.full(NUM, draft_s, np.float32),
        target_s_R=np.full(NUM, 0.1 + 0.01 * num_nodes, np.float32),
    )
    return replace(make_record(num_emitted=NUM, num_kept=1), rounds=rounds)


CHAIN = drafted([0, 1, 2], [Source.DIRECT] * 3, 0.03)


def test_what_memory_drafts_says_nothing_about_the_drafters_steps() -> None:
    memory = drafted([0, 1, 2, 3, 4, 5], [Source.SUFFIX] * 6, 0.0)
    fitted = speedup_model.fit([memory, memory, CHAIN])
    assert fitted is not None
    assert fitted.step_s == pytest.approx(0.01, rel=1e-4)
    assert fitted.pass_s == pytest.approx(0.1, rel=1e-4)
    assert fitted.row_s == pytest.approx(0.01, rel=1e-4)
    assert speedup_model.fit([memory]) is None


def test_in_a_tree_of_both_the_drafters_nodes_are_its_steps() -> None:
    """Three of memory beside two of the drafter, one of which continues what memory drafted."""
    both = drafted([0, 1, 2, 0, 4, 3], [Source.SUFFIX] * 3 + [Source.DIRECT, Source.SPLIT, Source.DIRECT], 0.02)
    fitted = speedup_model.fit([both])
    assert fitted is not None
    assert fitted.step_s == pytest.approx(0.01, rel=1e-4)
