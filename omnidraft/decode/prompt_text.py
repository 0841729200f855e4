"""From a client's request in text to prompt ids."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from omnidraft.decode.generation import GenerationRequest
from omnidraft.errors import RequestError
from omnidraft.vocab.tokenizer import Tokenizer


class PromptTokenizer(Tokenizer, Protocol):
    """A tokenizer that also knows its model's chat template and stop ids."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    def chat_prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def prompt_ids(self, text: str) -> list[int]: ...


def prompt_ids(request: GenerationRequest, tokenizer: PromptTokenizer) -> list[int]:
    """Return a request's prompt in a model's ids and chat template. Raises RequestError when there is no prompt."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either a prompt or messages")
    if request.messages is not None:
        if not request.messages:
            raise RequestError("the prompt is empty; give at least one message")
        return tokenizer.chat_prompt_ids(request.messages)
    if not request.prompt:
        raise RequestError("the prompt is empty; give at least one character")
    return tokenizer.prompt_ids(request.prompt)


def client_texts(request: GenerationRequest) -> Mapping[str, Iterable[str]]:
    """Return every string that the client wrote, by its field in the request."""
    messages = [text for message in request.messages or () for text in message.values()]
    texts = {"prompt": [request.prompt or ""], "stop": request.stop_strings, "user": [request.tenant]}
    grammar = request.sampling.grammar
    return {**texts, "messages": messages, **({grammar.kind: [grammar.text]} if grammar else {})}
