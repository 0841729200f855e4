"""A prompt of a file as a request: one user message in the models' templates, the plain text where there is none."""

from collections.abc import Mapping, Sequence
from typing import Any

from omnidraft import assembly
from omnidraft.decode.prompting import PromptTokenizer
from omnidraft.ports import Request
from omnidraft.prompts import Prompt


def request_for(
    prompt: Prompt, tokenizers: assembly.Vocabularies, max_new_tokens: int, num_draft_tokens: int
) -> Request:
    """Return a request in fast mode at temperature 0; `num_draft_tokens` 0 is plain decoding."""
    return Request(
        prompt_ids=tuple(ids_of(prompt, tokenizers.target)),
        drafter_prompt_ids=tuple(ids_of(prompt, tokenizers.drafter)),
        max_new_tokens=max_new_tokens,
        stop_ids=tokenizers.target.stop_ids,
        mode="fast",
        num_draft_tokens=num_draft_tokens,
    )


def ids_of(prompt: Prompt, tokenizer: PromptTokenizer) -> Sequence[int]:
    """Return the ids that a model answers behind."""
    if tokenizer.has_chat_template:
        return tokenizer.chat_prompt_ids(_messages(prompt))
    return tokenizer.prompt_ids(prompt.text)


def fields_of(prompt: Prompt, tokenizer: PromptTokenizer) -> Mapping[str, Any]:
    """Return the field of a GenerationRequest for the target with this tokenizer."""
    return {"messages": _messages(prompt)} if tokenizer.has_chat_template else {"prompt": prompt.text}


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt.text}]
