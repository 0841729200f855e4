// OpenAI's, Anthropic's and Vercel's clients for Node.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const { MODEL, OPENAI_BASE_URL, ANTHROPIC_BASE_URL } = process.env;
const ask = [{ role: "user", content: "Write the word hello and nothing else." }];

const openai = new OpenAI();
const whole = await openai.chat.completions.create({ model: MODEL, messages: ask, temperature: 0 });
let streamed = "";
for await (const part of await openai.chat.completions.create({ model: MODEL, messages: ask, temperature: 0, stream: true }))
  streamed += part.choices[0]?.delta?.content ?? "";
assert.equal(streamed, whole.choices[0].message.content);

const anthropic = new Anthropic();
const message = await anthropic.messages.stream({ model: MODEL, max_tokens: 4096, messages: ask }).finalMessage();
assert.ok(message.content[0].text);

const called = [];
const weather = tool({
  description: "Tell the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (called.push(city), `It is sunny in ${city}.`),
});
const providers = [
  createOpenAICompatible({ name: "here", baseURL: OPENAI_BASE_URL, supportsStructuredOutputs: true })(MODEL),
  createOpenAI({})(MODEL),
  createOpenAI({}).chat(MODEL),
  createAnthropic({ baseURL: `${ANTHROPIC_BASE_URL}/v1` })(MODEL),
];
for (const model of providers) {
  assert.ok((await generateText({ model, prompt: "Say hi." })).text);
  const before = called.length;
  await generateText({
    model, tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(1), prompt: "What is the weather in Rome?",
  });
  assert.ok(called.length > before, "no tool was called");
}
const { output } = await generateText({
  model: providers[0],
  output: Output.object({ schema: z.object({ name: z.string() }) }),
  prompt: "Tell about Rome, Italy.",
});
assert.ok(output.name);
