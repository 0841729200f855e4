"""What a trainer asks OpenAI's client for: the ids that were drawn, their log-probabilities, ids as prompts."""

import json
import os

from openai import OpenAI

client, model = OpenAI(), os.environ["MODEL"]
ask = [{"role": "user", "content": "Name three colours, with an emoji each: \u00e9t\u00e9 \U0001f308."}]
drawn = {"return_token_ids": True, "seed": 7}
chat = client.chat.completions.create(
    model=model, messages=ask, max_tokens=48, temperature=1, logprobs=True, n=2, extra_body=drawn
)
stream = client.chat.completions.create(
    model=model, messages=ask, max_tokens=48, temperature=1, logprobs=True, stream=True, extra_body=drawn
)
streamed = {"prompt": None, "ids": [], "log_probs": [], "text": ""}
for chunk in stream:
    streamed["prompt"] = streamed["prompt"] or getattr(chunk, "prompt_token_ids", None)
    for choice in chunk.choices:
        streamed["ids"] += choice.token_ids
        streamed["log_probs"] += [each.logprob for each in (choice.logprobs.content if choice.logprobs else ())]
        streamed["text"] += choice.delta.content or ""
rollouts = [
    {
        "prompt": chat.prompt_token_ids,
        "ids": choice.token_ids,
        "log_probs": [each.logprob for each in choice.logprobs.content],
        "text": choice.message.content,
    }
    for choice in chat.choices
]
text = "def largest(numbers):\n    "
plain = client.completions.create(model=model, prompt=text, max_tokens=24, logprobs=0, extra_body=drawn)
middle = plain.choices[0].text[len(plain.choices[0].text) // 2 :][:4]
stopped = client.completions.create(
    model=model, prompt=text, max_tokens=24, logprobs=0, stop=[middle], extra_body=drawn
)
again = client.completions.create(
    model=model, prompt=plain.choices[0].prompt_token_ids, max_tokens=24, logprobs=0, extra_body=drawn
)
assert (again.choices[0].text, again.choices[0].token_ids) == (plain.choices[0].text, plain.choices[0].token_ids)
rollouts += [
    {
        "prompt": each.choices[0].prompt_token_ids,
        "ids": each.choices[0].token_ids,
        "log_probs": each.choices[0].logprobs.token_logprobs,
        "text": each.choices[0].text,
    }
    for each in (plain, stopped)
]
print(json.dumps([streamed, *rollouts, middle]))
