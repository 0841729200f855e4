"""Reads the text of one choice while it is decoded: thoughts, content, and calls of tools."""

import logging
from functools import lru_cache

from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.prompting import Pair
from omnidraft.serving.queued_request import QueuedText
from omnidraft.serving.response_formats import ChoicePart, NamedCall, Thought
from omnidraft.tools.formats import ToolFormat
from omnidraft.tools.messages import call_id
from omnidraft.tools.parser import CallDelta, ToolCallParser
from omnidraft.tools.reasoning import AnswerPart, ReasoningFormat, ReasoningSplitter
from omnidraft.vocab.thoughts import Thoughts

logger = logging.getLogger(__name__)


class AnswerReader:
    """Reads one choice, part by part."""

    def __init__(
        self,
        request: GenerationRequest,
        form: ToolFormat,
        reasoning: ReasoningFormat | None = None,
        thoughts: Thoughts | None = None,
    ) -> None:
        """Read the choice of a request to a target that writes calls and thoughts in these formats; None where it has
        no thoughts."""
        self._request_id, self._form, self._thoughts = request.request_id, form, thoughts
        self._state = None if thoughts is None else thoughts.start
        self._splitter: ReasoningSplitter | None = None
        if reasoning is not None and thoughts is not None:
            self._splitter = ReasoningSplitter(reasoning, is_open=thoughts.is_open)
        self._parser: ToolCallParser | None = None
        if request.tools is not None and request.tools.callable_tools:
            schemas = {tool.name: tool.parameters for tool in request.tools.callable_tools}
            self._parser = ToolCallParser(self._form, schemas)

    @staticmethod
    def of(text: QueuedText, pair: Pair) -> "AnswerReader":
        """Return the reader of a text that this pair decodes."""
        thoughts = None if text.decoded is None else text.decoded.thoughts
        return AnswerReader(text.request, pair.tool_format, pair.reasoning_format, thoughts)

    @property
    def num_thoughts(self) -> int:
        """The tokens of thoughts so far."""
        return 0 if self._state is None else self._state.num_thoughts

    @property
    def is_typed_by_schemas(self) -> bool:
        """Whether arguments are written without types, so that the tools' schemas say them."""
        return self._parser is not None and (self._parser.unusual or self._form).keyed is not None

    def read(self, text: str, part: ChoicePart) -> None:
        """Add what the text of a step says to its part. The part with a finish reason is the last one."""
        is_last = part.finish_reason is not None
        if self._thoughts is not None and self._state is not None:
            for token in part.token_ids:
                self._state = self._thoughts.after(self._state, token)
        for each in self._split(text, is_last=is_last):
            if each.is_reasoning:
                part.pieces.append(Thought(each.text))
            elif self._parser is None:
                part.pieces.append(each.text)
            else:
                part.pieces += map(self._named, self._parser.feed(each.text).pieces)
        if self._parser is not None and is_last:
            self._end(self._parser, part)

    def _split(self, text: str, *, is_last: bool) -> list[AnswerPart]:
        if self._splitter is None:
            return [AnswerPart(text, False)] if text else []
        return [*self._splitter.feed(text), *(self._splitter.finish() if is_last else ())]

    def _end(self, parser: ToolCallParser, part: ChoicePart) -> None:
        part.pieces += map(self._named, parser.finish().pieces)
        if part.finish_reason == "stop" and parser.num_calls and not parser.has_open_call:
            part.finish_reason = "tool_calls"
        if parser.unusual is not None:
            _tell_of_notation(parser.unusual.name, self._form.name)

    def _named(self, piece: str | CallDelta) -> str | NamedCall:
        """Return a piece of the answer with the id of the call that begins in it."""
        if isinstance(piece, str):
            return piece
        identifier = None if piece.name is None else call_id(self._request_id, piece.index, self._form)
        return NamedCall(piece.index, identifier, piece.name, piece.arguments)


@lru_cache(None)
def _tell_of_notation(written: str, shown: str) -> None:
    """Log, once, that a model writes calls in another notation than its chat template shows, or without its markers."""
    written = f"{written} without its markers" if written == shown else written
    logger.info("the model writes calls as %s and its chat template shows %s; they are understood", written, shown)
