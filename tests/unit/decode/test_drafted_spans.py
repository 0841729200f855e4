"""Every piece of a text has the source of the token that spells it, also where characters take several tokens."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from omnidraft.decode.drafted_spans import DraftedSpans
from omnidraft.decode.stop_checker import StopChecker
from omnidraft.ports import DraftTree, Request, Sampling, Source, Step, Timings
from omnidraft.vocab.tokenizer import Vocabulary

PIECES = (b"a", b"bc", b" ", b"\xe2", b"\x82", b"\xac", b"\xc3\xa9d", b"stop", b"")
VOCABULARY = Vocabulary(PIECES, {}, frozenset())
TOKENS = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=4)


def step(checker: StopChecker, tokens: Sequence[int], num_accepted: int) -> Step:
    """A pass whose first tokens were drafted, up to the end of the text."""
    emitted: list[int] = []
    for token in tokens:
        emitted.append(token)
        if checker.ends(token):
            break
    drafted = emitted[:num_accepted]
    sources = [Source.DIRECT if token % 2 else Source.MERGE for token in drafted]
    tree = DraftTree.chain(0, drafted, sources, [0.0] * len(drafted))
    path = tuple(range(1, len(drafted) + 1))
    return Step(tree, tuple(emitted), path, checker.take(), checker.finish_reason, Timings(), None)


@given(passes=st.lists(st.tuples(TOKENS, st.integers(0, 4)), min_size=1, max_size=6))
def test_the_spans_are_the_text_and_each_has_the_source_of_its_token(passes: list[tuple[list[int], int]]) -> None:
    checker = StopChecker(Request((0,), (), 12, Sampling(), stop_strings=(b"stop",)), VOCABULARY)
    spans = DraftedSpans(VOCABULARY)
    for tokens, num_accepted in passes:
        if checker.finish_reason is not None:
            break
        made = step(checker, tokens, num_accepted)
        told = spans.take(made)
        assert "".join(span.text for span in told) == made.text
        assert all(span.text for span in told)


def test_whole_tokens_have_their_own_sources() -> None:
    checker, spans = StopChecker(Request((0,), (), 12), VOCABULARY), DraftedSpans(VOCABULARY)
    told = spans.take(step(checker, [1, 0, 2], 2))
    assert [(span.text, span.source) for span in told] == [("bc", Source.DIRECT), ("a", Source.MERGE), (" ", None)]


def test_a_character_of_several_tokens_is_one_span_when_it_is_complete() -> None:
    checker, spans = StopChecker(Request((0,), (), 12), VOCABULARY), DraftedSpans(VOCABULARY)
    assert [span.text for span in spans.take(step(checker, [0, 3], 0))] == ["a"]
    assert [span.text for span in spans.take(step(checker, [4, 5, 2], 1))] == ["\u20ac", " "]
