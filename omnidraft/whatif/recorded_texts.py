"""The whole answers of a log, as requests that can be decoded again."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass

from omnidraft.params import sampling_of
from omnidraft.ports import Request, Work, recorded_work
from omnidraft.traces.record import TraceRecord

_DEEPEST = 64
"""Tokens that would have been drafted at most behind the end of an answer that its target ended."""


@dataclass(frozen=True, slots=True)
class RecordedText:
    """An answer that a target gave."""

    request_id: str
    request: Request
    """Drafts nothing yet; ends with the answer's last token and by nothing else."""
    answer_ids: tuple[int, ...]
    work: Work


def recorded_texts(
    records: Iterable[TraceRecord], stop_ids: Set[int] = frozenset()
) -> tuple[list[RecordedText], Counter[str]]:
    """Return the answers in the order in which their first segments ended, and the number of those left out, by reason:
    some of their segments are missing, or the engine did not report their settings.

    Args:
        stop_ids: the target's own, behind which nothing is drafted, unless an answer went on behind one.
    """
    segments = defaultdict[str, dict[int, TraceRecord]](dict)
    for record in records:
        segments[record.request_id].setdefault(record.segment, record)
    texts, left_out = list[RecordedText](), Counter[str]()
    for of_answer in sorted(segments.values(), key=lambda each: each[min(each)].time_ms):
        ordered = [of_answer[number] for number in sorted(of_answer)]
        if [record.segment for record in ordered] != list(range(len(ordered))) or ordered[-1].finish_reason is None:
            left_out["incomplete"] += 1
        elif not ordered[0].has_settings:
            left_out["without_settings"] += 1
        else:
            texts.append(_text(ordered, stop_ids))
    return texts, left_out


def _text(segments: list[TraceRecord], stop_ids: Set[int]) -> RecordedText:
    first = segments[0]
    answer_ids = tuple(token for segment in segments for token in segment.emitted_ids.tolist())
    ends = frozenset(stop_ids).difference(answer_ids[:-1])
    num_beyond = _DEEPEST if ends.intersection(answer_ids[-1:]) else 0
    request = Request(
        tuple(first.prompt_ids.tolist()),
        tuple(first.drafter_prompt_ids.tolist()),
        len(answer_ids) + num_beyond,
        sampling=sampling_of(first),
        seed=first.seed,
        stop_ids=ends,
        mode="fast" if first.mode == "fast" else "reproducible",
        tenant=first.tenant,
    )
    return RecordedText(first.request_id, request, answer_ids, recorded_work(has_grammar=first.has_grammar))
