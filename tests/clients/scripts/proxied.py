"""Chat, Responses and Messages through a proxy that translates them."""

import os

from anthropic import Anthropic
from openai import OpenAI

model = os.environ["MODEL"]
ask = [{"role": "user", "content": "Write the word hello and nothing else."}]
with OpenAI().chat.completions.stream(model=model, messages=ask, temperature=0) as stream:
    answer = stream.get_final_completion().choices[0].message.content
assert "hello" in answer.lower()
response = OpenAI().responses.create(model=model, input="Say hi.", reasoning={"effort": "low"})
assert response.output_text
thinking = {"type": "enabled", "budget_tokens": 1024}
message = Anthropic().messages.create(model=model, max_tokens=2048, thinking=thinking, messages=ask)
assert "hello" in "".join(block.text for block in message.content if block.type == "text").lower()
with Anthropic().messages.stream(model=model, max_tokens=64, messages=ask) as stream:
    assert stream.get_final_text()
