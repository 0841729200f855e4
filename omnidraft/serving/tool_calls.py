"""Takes the calls of tools out of the text of a choice, whole or streamed."""

from omnidraft.decode.generation import GenerationRequest
from omnidraft.serving.response_formats import ChoicePart, NamedCall
from omnidraft.tools.formats import ToolFormat
from omnidraft.tools.messages import call_id
from omnidraft.tools.parser import ToolCallParser


class ToolCallReader:
    """Reads one choice, part by part."""

    def __init__(self, request: GenerationRequest, form: ToolFormat) -> None:
        assert request.tools is not None
        self._parser = ToolCallParser(form, {tool.name for tool in request.tools.callable_tools})
        self._request_id = request.request_id
        self._form = form

    def read(self, part: ChoicePart) -> None:
        """Move what the part's text says about calls into its calls. The part with a finish reason is the last one."""
        parsed = [self._parser.feed(part.text)]
        if part.finish_reason is not None:
            parsed.append(self._parser.finish())
            if part.finish_reason == "stop" and self._parser.num_calls and not self._parser.has_open_call:
                part.finish_reason = "tool_calls"
        part.text = "".join(each.content for each in parsed)
        for delta in (delta for each in parsed for delta in each.calls):
            identifier = None if delta.name is None else call_id(self._request_id, delta.index, self._form)
            part.calls.append(NamedCall(delta.index, identifier, delta.name, delta.arguments))


def reader_of(request: GenerationRequest, form: ToolFormat) -> ToolCallReader | None:
    """Return the reader of a request's choice; None where it can call nothing."""
    if request.tools is None or not request.tools.callable_tools:
        return None
    return ToolCallReader(request, form)
