"""Takes the calls of tools out of the text of a choice, whole or streamed."""

from omnidraft.decode.generation import GenerationRequest
from omnidraft.serving.response_formats import ChoicePart, NamedCall
from omnidraft.tools.formats import ToolFormat
from omnidraft.tools.messages import call_id
from omnidraft.tools.parser import CallDelta, ToolCallParser


class ToolCallReader:
    """Reads one choice, part by part."""

    def __init__(self, request: GenerationRequest, form: ToolFormat) -> None:
        assert request.tools is not None
        self._parser = ToolCallParser(form, {tool.name for tool in request.tools.callable_tools})
        self._request_id = request.request_id
        self._form = form

    def read(self, part: ChoicePart) -> None:
        """Replace the part's text by the content and the calls in it. The part with a finish reason is the last one."""
        parsed = [self._parser.feed(part.text)]
        if part.finish_reason is not None:
            parsed.append(self._parser.finish())
            if part.finish_reason == "stop" and self._parser.num_calls and not self._parser.has_open_call:
                part.finish_reason = "tool_calls"
        part.pieces = [self._named(piece) for each in parsed for piece in each.pieces]

    def _named(self, piece: str | CallDelta) -> str | NamedCall:
        """Return a piece of the answer with the id of the call that begins in it."""
        if isinstance(piece, str):
            return piece
        identifier = None if piece.name is None else call_id(self._request_id, piece.index, self._form)
        return NamedCall(piece.index, identifier, piece.name, piece.arguments)


def reader_of(request: GenerationRequest, form: ToolFormat) -> ToolCallReader | None:
    """Return the reader of a request's choice; None where it can call nothing."""
    if request.tools is None or not request.tools.callable_tools:
        return None
    return ToolCallReader(request, form)
