"""Where the thoughts of an answer begin and end, token by token, whatever tokens spell their markers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto

from omnidraft.vocab.tokenizer import Vocabulary

MAX_BLANK = 16
"""Bytes of white space before the content; further ones belong to it."""


class Spellings:
    """The tokens that spell one marker, by the number of its bytes that were said before."""

    def __init__(self, spelled: Sequence[bytes], marker: bytes) -> None:
        self.marker = marker
        by_first: dict[int, list[int]] = {first: [] for first in marker}
        for token, data in enumerate(spelled):
            if data and data[0] in by_first:
                by_first[data[0]].append(token)
        places = [(marker[place:], by_first[marker[place]]) for place in range(len(marker))]
        inside = [[token for token in tokens if left.startswith(spelled[token])] for left, tokens in places]
        self.longest = [max(each, key=lambda token: len(spelled[token]), default=None) for each in inside]
        """The token that says most of the marker."""
        behind = [
            {token: spelled[token][len(left) :] for token in tokens if spelled[token].startswith(left)}
            for left, tokens in places
        ]
        self.going_on = [frozenset((*each, *more)) for each, more in zip(inside, behind, strict=True)]
        """Tokens that go on with the marker, maybe beyond it."""
        self.beyond = [frozenset(token for token, text in each.items() if text.strip()) for each in behind]
        """Those that go beyond it, with more than white space."""

    def progress(self, text: bytes) -> int:
        """Return how much of the marker the end of a text has said, which does not hold all of it."""
        most = min(len(text), len(self.marker) - 1)
        return next((num for num in range(most, 0, -1) if text.endswith(self.marker[:num])), 0)


class ThoughtMarkers:
    """The markers around the thoughts of one model, in its vocabulary."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        special_texts: Mapping[int, bytes],
        opening: str,
        closing: str,
        *,
        header: str = "",
        may_return: bool = False,
    ) -> None:
        """
        Args:
            special_texts: the texts of the markers' special tokens, which spell nothing.
            header: what stands before the content and is none.
            may_return: whether thoughts may come behind others, and behind content.
        """
        self.spelled = [special_texts.get(token, data) for token, data in enumerate(vocabulary.token_bytes)]
        self.opening, self.closing = (Spellings(self.spelled, each.encode()) for each in (opening, closing))
        self.header, self.may_return = header.encode(), may_return
        blank = [token for token, data in enumerate(self.spelled) if data and not data.strip()]
        self.blank = {token: len(self.spelled[token]) for token in blank}
        """White space, with its length."""


class Phase(StrEnum):
    LEAD = auto()
    """Nothing but white space was said, or the beginning of an opening marker."""
    THOUGHTS = auto()
    CONTENT = auto()


@dataclass(frozen=True, slots=True)
class ThoughtState:
    """What an answer has said."""

    phase: Phase
    may_open: bool = True
    """Whether thoughts may begin here."""
    progress: int = 0
    """Bytes of the marker that may be under way."""
    num_blank: int = 0
    begin: int | None = None
    """The number of the content's first token; of the marker's that may be under way, which may be content too."""
    num_content: int = 0
    """Bytes of content at the end of the text; fewer than none in what stands before it."""
    num_thoughts: int = 0
    """Tokens of thoughts and of the markers that closed them."""


@dataclass(frozen=True, slots=True)
class Thoughts:
    """What is known of an answer's thoughts before it begins."""

    markers: ThoughtMarkers
    phase: Phase
    """THOUGHTS where the prompt has begun them, CONTENT where it leaves none."""
    has_grammar: bool = False
    """Whether the content matches a grammar, so that no thoughts come behind it."""
    budget: int | None = None
    """Tokens after which the closing marker is all that can be said."""

    @property
    def start(self) -> ThoughtState:
        return ThoughtState(self.phase, begin=0 if self.phase is Phase.CONTENT else None)

    @property
    def is_open(self) -> bool:
        """Whether the answer begins with thoughts."""
        return self.phase is Phase.THOUGHTS

    def after(self, state: ThoughtState, token: int, number: int = 0) -> ThoughtState:
        """Return the state after the answer's next token, of which so many came before, where its `begin` is asked."""
        if state.phase is Phase.THOUGHTS:
            state = replace(state, num_thoughts=state.num_thoughts + 1)
        return self._after(state, self.markers.spelled[token], number)

    def is_spent(self, state: ThoughtState) -> bool:
        """Return whether the closing marker is all that can be said."""
        return state.phase is Phase.THOUGHTS and self.budget is not None and state.num_thoughts >= self.budget

    def _after(self, state: ThoughtState, data: bytes, number: int) -> ThoughtState:
        match state.phase:
            case Phase.THOUGHTS:
                return self._after_thought(state, data, number)
            case Phase.LEAD:
                return self._after_lead(state, data, number)
        num_content = state.num_content + len(data)
        if not self.markers.may_return or self.has_grammar:
            return replace(state, num_content=num_content)
        opening = self.markers.opening
        before, found, behind = (opening.marker[: state.progress] + data).partition(opening.marker)
        if not found:
            return replace(state, num_content=num_content, progress=opening.progress(before))
        return self._after_thought(self._opened(state), behind, number)

    def _after_thought(self, state: ThoughtState, data: bytes, number: int) -> ThoughtState:
        closing = self.markers.closing
        before, found, behind = (closing.marker[: state.progress] + data).partition(closing.marker)
        if not found:
            return replace(state, progress=closing.progress(before))
        lead = ThoughtState(Phase.LEAD, self.markers.may_return, num_thoughts=state.num_thoughts)
        return self._after_lead(lead, behind, number)

    def _after_lead(self, state: ThoughtState, data: bytes, number: int) -> ThoughtState:
        opening = self.markers.opening.marker
        num_blank = state.num_blank + len(data)
        if not state.progress and not data.strip() and num_blank <= MAX_BLANK:
            return replace(state, num_blank=num_blank)
        text = opening[: state.progress] + data if state.progress else data.lstrip()
        if state.may_open and text.startswith(opening):
            return self._after_thought(self._opened(state), text[len(opening) :], number)
        begin = number if state.begin is None else state.begin
        if state.may_open and opening.startswith(text):
            return replace(state, progress=len(text), begin=begin)
        header = self.markers.header
        has_header = header.startswith(text) or text.startswith(header)
        num_content = len(text) - len(header) * has_header
        return replace(state, phase=Phase.CONTENT, progress=0, begin=begin, num_content=num_content)

    def _opened(self, state: ThoughtState) -> ThoughtState:
        return ThoughtState(Phase.THOUGHTS, num_thoughts=state.num_thoughts)
