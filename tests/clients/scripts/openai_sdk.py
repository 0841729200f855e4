"""OpenAI's own client: chat whole and streamed, tools, parsed answers, Responses, completions, ids, a prediction."""

import os

from openai import OpenAI
from pydantic import BaseModel

client, model = OpenAI(), os.environ["MODEL"]
ask = [{"role": "user", "content": "Write the word hello and nothing else."}]
plain = client.chat.completions.create(model=model, messages=ask, temperature=0, extra_body={"speculation": "off"})
drafted = client.chat.completions.create(model=model, messages=ask, temperature=0, reasoning_effort="low")
assert drafted.choices[0].message.content == plain.choices[0].message.content
with client.chat.completions.stream(model=model, messages=ask, temperature=0) as stream:
    streamed = stream.get_final_completion()
assert streamed.choices[0].message.content == plain.choices[0].message.content


class City(BaseModel):
    name: str
    country: str


parsed = client.chat.completions.parse(
    model=model, messages=[{"role": "user", "content": "Tell about Rome, Italy."}], response_format=City
)
assert parsed.choices[0].message.parsed.name
response = client.responses.create(model=model, input="Say hi.", reasoning={"effort": "low", "summary": "auto"})
assert response.status == "completed"
assert response.output_text
code = "def add(a, b):\n    return a + b\n"
edited = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": f"Repeat this code:\n{code}"}],
    prediction={"type": "content", "content": code},
    temperature=0,
    max_completion_tokens=64,
)
assert edited.usage.completion_tokens_details.accepted_prediction_tokens > 0
completion = client.completions.create(model=model, prompt=[100, 200, 300], max_tokens=1, logprobs=5, echo=True)
assert completion.choices[0].logprobs.token_logprobs[0] is None
