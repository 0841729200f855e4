"""A prompt of a file as a request: one user message in both models' templates, temperature 0."""

from collections.abc import Sequence

from omnidraft import wiring
from omnidraft.decode.prompting import PromptTokenizer
from omnidraft.ports import Request
from omnidraft.prompts import Prompt


def request_for(prompt: Prompt, tokenizers: wiring.Vocabularies, max_new_tokens: int, num_draft_tokens: int) -> Request:
    """Return a request in fast mode; `num_draft_tokens` 0 is plain decoding. No chat template: the plain text."""
    return Request(
        prompt_ids=tuple(_ids(prompt, tokenizers.target)),
        drafter_prompt_ids=tuple(_ids(prompt, tokenizers.drafter)),
        max_new_tokens=max_new_tokens,
        stop_ids=tokenizers.target.stop_ids,
        mode="fast",
        num_draft_tokens=num_draft_tokens,
    )


def _ids(prompt: Prompt, tokenizer: PromptTokenizer) -> Sequence[int]:
    if tokenizer.has_chat_template:
        return tokenizer.chat_prompt_ids([{"role": "user", "content": prompt.text}])
    return tokenizer.prompt_ids(prompt.text)
