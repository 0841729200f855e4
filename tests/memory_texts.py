"""Texts of memories for tests, and strategies that make them."""

import numpy as np
from hypothesis import strategies as st

from omnidraft.config import MemorySettings
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.memory.recent_texts import MemoryText
from omnidraft.traces.record import TraceRecord
from tests.trace_records import make_record

VOCABULARY_SIZE = 1000


def text(name: int = 0, ids: tuple[int, ...] = (1, 2, 3), **fields: object) -> MemoryText:
    """A segment with no context, the first of its request."""
    given = {"tenant": "t", "request": name, "segment": 0, "time_ms": 1, "num_context": 0}
    return MemoryText(**given | fields, ids=np.array(ids, np.uint32))  # type: ignore[arg-type]


def said(request: str, ids: list[int], **fields: object) -> TraceRecord:
    """A record that emitted these ids."""
    emitted = np.array(ids, np.uint32)
    empty = np.array([], np.uint32)
    return make_record(request, **{"prompt_ids": empty, "before_ids": empty} | fields | {"emitted_ids": emitted})


def memory(**settings: object) -> TextMemory:
    return TextMemory(MemorySettings(**settings), vocabulary_size=VOCABULARY_SIZE)  # type: ignore[arg-type]


@st.composite
def records(draw: st.DrawFn) -> list[TraceRecord]:
    """Records of a few tenants and requests, in segments that may come in any order and more than once."""
    ids = st.lists(st.integers(0, 5), min_size=1, max_size=6)
    return [
        said(
            f"request-{draw(st.integers(0, 4))}",
            draw(ids),
            segment=draw(st.integers(0, 3)),
            tenant=draw(st.sampled_from(["a", "b", "c"])),
            time_ms=draw(st.integers(1, 100)),
            prompt_ids=np.array(draw(ids), np.uint32),
            before_ids=np.array(draw(ids), np.uint32),
        )
        for _ in range(draw(st.integers(0, 12)))
    ]
