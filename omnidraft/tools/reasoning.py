"""The notations in which models write their thoughts before an answer, and a splitter of thoughts and answer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import regex


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The notation in which a model writes thoughts."""

    name: str
    opening: str
    closing: str
    turn: str = ""
    """What stands between thoughts and the next message of an answer."""
    header: str = ""
    """What stands before content."""
    other_ends: tuple[str, ...] = ()
    """Further texts between messages of an answer, which are neither thoughts nor content."""
    is_anywhere: bool = False
    """Whether thoughts may come behind content."""
    is_in_template: str = ""
    """A chat template that holds this text teaches this notation."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be tokens of their own in what frames thoughts."""
        parts = (self.opening, self.closing, *self.dropped)
        return tuple(dict.fromkeys(marker for part in parts for marker in _MARKER.findall(part)))

    @property
    def dropped(self) -> tuple[str, ...]:
        """What stands between messages of an answer, and is neither thoughts nor content."""
        return tuple(filter(None, (self.turn, self.header, *self.other_ends)))


_MARKER = regex.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_ROWS = (
    ReasoningFormat(  # gpt-oss
        "harmony",
        f"{_CHANNEL}analysis{_MESSAGE}",
        "<|end|>",
        "<|start|>assistant",
        f"{_CHANNEL}final{_MESSAGE}",
        (f"{_CHANNEL}commentary{_MESSAGE}", "<|return|>"),
        is_anywhere=True,
        is_in_template=f"{_CHANNEL}analysis",
    ),
    ReasoningFormat("gemma", "<|channel>thought", "<channel|>", is_anywhere=True, is_in_template="<|channel>thought"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", is_in_template="[THINK]"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>", is_in_template="<seed:think>"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>", is_in_template="<|START_THINKING|>"),
    ReasoningFormat("think", "<think>", "</think>", is_in_template="<think>"),  # Qwen3, DeepSeek, GLM, MiniMax, Kimi
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {row.name: row for row in _ROWS}


def detect_reasoning(chat_template: str) -> ReasoningFormat | None:
    """Return the format of a chat template's own thoughts; None where it shows none."""
    return next((row for row in _ROWS if row.is_in_template in chat_template), None)


class AnswerPart(NamedTuple):
    """A piece of an answer."""

    text: str
    is_reasoning: bool


class ReasoningSplitter:
    """Splits one answer, as it is written, into thoughts and content, without the markers and the white space beside
    them. How a text is cut into pieces changes nothing but when what comes."""

    def __init__(self, form: ReasoningFormat, *, is_open: bool) -> None:
        """Begin in content, or in thoughts where the prompt `is_open`."""
        self._form = form
        self._markers = regex.compile("|".join(map(regex.escape, (form.opening, form.closing, *form.dropped))))
        self.is_reasoning = is_open
        self._has_content = False
        self._is_stripping = True  # white space behind a marker
        self._space = ""  # white space that is text if more text follows
        self._buffer = ""

    def feed(self, text: str) -> list[AnswerPart]:
        """Return what the next piece of the answer says."""
        self._buffer += text
        return list(self._parts(is_last=False))

    def finish(self) -> list[AnswerPart]:
        """Return what was held back, at the end of the answer."""
        return list(self._parts(is_last=True))

    def _parts(self, *, is_last: bool) -> Iterator[AnswerPart]:
        searched = 0
        while match := self._markers.search(self._buffer, searched, partial=not is_last):
            if match.partial or not self._counts(match[0], match.start()):
                if match.partial:
                    break
                searched = match.end()
                continue
            yield from self._said(self._buffer[: match.start()])
            self._buffer, searched = self._buffer[match.end() :], 0
            if match[0] not in self._form.dropped:
                self.is_reasoning = match[0] == self._form.opening
            self._is_stripping, self._space = True, ""
        cut = len(self._buffer) if match is None else match.start()
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        yield from self._said(text)
        if is_last and self._space and not self.is_reasoning:
            yield AnswerPart(self._space, False)

    def _counts(self, marker: str, position: int) -> bool:
        """Return whether a marker at this position of the buffer is one: models also write about them."""
        if marker == self._form.closing:
            return self.is_reasoning
        if self._form.is_anywhere:
            return not self.is_reasoning
        has_content = self._has_content or bool(self._buffer[:position].strip())
        return not self.is_reasoning and not has_content

    def _said(self, text: str) -> Iterator[AnswerPart]:
        if self._is_stripping:
            text = text.lstrip()
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._is_stripping = False
            self._has_content |= not self.is_reasoning
            yield AnswerPart(said, self.is_reasoning)
