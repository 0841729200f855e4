"""Anthropic's own client: messages whole and streamed, thinking, a tool runner, counted tokens."""

import os

from anthropic import Anthropic, beta_tool

client, model = Anthropic(), os.environ["MODEL"]
GREEDY = {"temperature": 0}
ask = [{"role": "user", "content": "Write the word hello and nothing else."}]
whole = client.messages.create(model=model, max_tokens=32_000, messages=ask, extra_body=GREEDY, timeout=600)
with client.messages.stream(model=model, max_tokens=4_096, messages=ask, extra_body=GREEDY) as stream:
    assert stream.get_final_text() == whole.content[0].text
thinking = client.messages.create(
    model=model, max_tokens=2_048, messages=ask, thinking={"type": "enabled", "budget_tokens": 1_024}
)
assert thinking.stop_reason == "end_turn"
assert client.messages.count_tokens(model=model, messages=ask).input_tokens > 5


@beta_tool
def weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: its name.
    """
    return f"It is sunny in {city}."


runner = client.beta.messages.tool_runner(
    model="claude-haiku-4-5",
    max_tokens=512,
    tools=[weather],
    messages=[{"role": "user", "content": "What is the weather in Rome?"}],
    extra_body=GREEDY,
    max_iterations=3,
)
assert any(block.type == "tool_use" for message in runner for block in message.content)
