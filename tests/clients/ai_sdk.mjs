// What client_ai_sdk.py runs: node ai_sdk.mjs URL MODEL. Prints a line of JSON for each thing that was done.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "aengine", baseURL, includeUsage: true, supportsStructuredOutputs: true });
const add = tool({
  description: "Add.",
  inputSchema: z.object({ x: z.number(), y: z.number() }),
  execute: async ({ x, y }) => x + y,
});
const sum = { prompt: "What is 2 + 3?", tools: { add }, stopWhen: isStepCount(4), maxRetries: 0 };
const city = { prompt: "Which city?", output: Output.object({ schema: z.object({ city: z.string() }) }), maxRetries: 0 };

async function report(what, run) {
  try {
    console.log(JSON.stringify({ what, saw: await run() }));
  } catch (error) {
    console.log(JSON.stringify({ what, saw: `${error.name}: ${error.message}`.slice(0, 300) }));
  }
}

async function streamed(options) {
  let failure;
  const result = streamText({ ...options, onError: ({ error }) => (failure = error) });
  let text = "";
  for await (const part of result.textStream) text += part;
  if (failure) throw failure;
  return text;
}

for (const [name, made] of [
  ["openai(), which is by responses", openai(model)],
  ["openai.chat()", openai.chat(model)],
  ["createOpenAICompatible()", compatible(model)],
]) {
  await report(`AI SDK, ${name}: a tool`, async () => (await generateText({ ...sum, model: made })).text);
  await report(`AI SDK, ${name}: a tool, streamed`, () => streamed({ ...sum, model: made }));
  await report(`AI SDK, ${name}: a schema`, async () => (await generateText({ ...city, model: made })).output.city);
  await report(`AI SDK, ${name}: a schema, streamed`, async () => JSON.parse(await streamed({ ...city, model: made })).city);
}

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { x: { type: "number" }, y: { type: "number" } }, required: ["x", "y"] };
const called = { name: "add", description: "Add.", parse: JSON.parse, function: ({ x, y }) => String(x + y), parameters };
await report("openai, runTools, streamed", async () => {
  const messages = [{ role: "user", content: "What is 2 + 3?" }];
  const tools = [{ type: "function", function: called }];
  return client.chat.completions.runTools({ model, messages, tools, stream: true }).finalContent();
});
await report("openai, responses.stream", async () => {
  const stream = client.responses.stream({ model, input: "Which city?" });
  for await (const event of stream) void event;
  return (await stream.finalResponse()).output_text;
});
await report("openai, a stream that is left", async () => {
  const stream = await client.chat.completions.create({ model, stream: true, messages: [{ role: "user", content: "wait" }] });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  return "left";
});
