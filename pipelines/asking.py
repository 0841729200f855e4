"""A prompt of a file as a request: one user message in both models' templates, temperature 0."""

from omnidraft import wiring
from omnidraft.ports import Request
from omnidraft.prompts import Prompt


def request_for(prompt: Prompt, words: wiring.Vocabularies, max_new_tokens: int, num_draft_tokens: int) -> Request:
    """In fast mode; `num_draft_tokens` 0 is plain decoding."""
    messages = [{"role": "user", "content": prompt.text}]
    return Request(
        prompt_ids=tuple(words.target.chat_prompt_ids(messages)),
        drafter_prompt_ids=tuple(words.drafter.chat_prompt_ids(messages)),
        max_new_tokens=max_new_tokens,
        stop_ids=words.target.stop_ids,
        mode="fast",
        num_draft_tokens=num_draft_tokens,
    )
