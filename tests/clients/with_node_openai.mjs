// OpenAI's client library for Node.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  CALLER, CALLER_URL, FUNCTION, KEY, LENGTH, MESSAGES, MODEL, QUESTION, REPLY, SCHEMA, TOO_LONG, URL,
  check, embedded, planet, raised, run, same,
} from "./checks.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const caller = new OpenAI({ baseURL: CALLER_URL, apiKey: KEY, maxRetries: 0 });
const REQUEST = { model: MODEL, messages: MESSAGES, max_tokens: LENGTH, temperature: 0 };
const ANSWERED = { model: MODEL, input: QUESTION, max_output_tokens: LENGTH, temperature: 0 };

async function chat() {
  const found = await client.chat.completions.create(REQUEST);
  check(found.usage.total_tokens === found.usage.prompt_tokens + found.usage.completion_tokens, found.usage);
  const answered = await client.responses.create(ANSWERED);
  return same(found.choices[0].message.content, answered.output_text);
}

async function stream() {
  const helper = client.chat.completions.stream({ ...REQUEST, stream_options: { include_usage: true } });
  let text = "";
  for await (const chunk of helper) text += chunk.choices[0]?.delta.content ?? "";
  check((await helper.totalUsage()).completion_tokens > 0, "no usage");
  same(await helper.finalContent(), text);
  const events = client.responses.stream(ANSWERED);
  let answered = "";
  for await (const event of events) if (event.type === "response.output_text.delta") answered += event.delta;
  return same(answered, text);
}

async function tools() {
  const asked = [];
  const tool = { type: "function", function: { ...FUNCTION, parse: JSON.parse, function: ({ city }) => (asked.push(city), "sunny") } };
  for (const streamed of [false, true]) {
    const runner = caller.chat.completions.runTools({ model: CALLER, messages: MESSAGES, tools: [tool], stream: streamed });
    same(await runner.finalContent(), REPLY);
  }
  same(asked, ["Bern", "Bern"]);
}

async function forced() {
  const tool = { type: "function", function: { name: "planet", parameters: SCHEMA, strict: true } };
  const found = await client.chat.completions.create({ ...REQUEST, max_tokens: 100, tools: [tool], tool_choice: { type: "function", function: { name: "planet" } } });
  planet(found.choices[0].message.tool_calls[0].function.arguments);
}

async function schema() {
  const format = { type: "json_schema", json_schema: { name: "planet", schema: SCHEMA, strict: true } };
  return planet((await client.chat.completions.create({ ...REQUEST, response_format: format })).choices[0].message.content);
}

async function zod() {
  const shape = z.object({ name: z.string().max(12), moons: z.number().int().min(0).max(99) });
  const found = await client.chat.completions.parse({ ...REQUEST, max_tokens: 100, response_format: zodResponseFormat(shape, "planet") });
  planet(found.choices[0].message.parsed);
}

async function completion() {
  return (await client.completions.create({ model: MODEL, prompt: "Once upon a time", max_tokens: LENGTH, temperature: 0 })).choices[0].text;
}

async function embeddings() {
  const [base64, floats] = await Promise.all([undefined, "float"].map((encoding_format) =>
    client.embeddings.create({ model: MODEL, input: QUESTION, encoding_format })));
  return same(embedded(base64.data[0].embedding), embedded(floats.data[0].embedding));
}

async function abort() {
  const streamed = await client.chat.completions.create({ ...REQUEST, max_tokens: 4000, stream: true });
  for await (const chunk of streamed) if (chunk.choices[0]?.delta.content) break;
  same((await client.chat.completions.create({ ...REQUEST, max_tokens: 1 })).usage.completion_tokens, 1);
}

await run({
  chat,
  stream,
  "agent with a tool": tools,
  "forced call": forced,
  "JSON schema": schema,
  "JSON schema as an object": zod,
  completion,
  embeddings,
  "a stream that is left": abort,
  "wrong key": () => raised(() => new OpenAI({ baseURL: URL, apiKey: "wrong" }).models.list(), (error) => error instanceof OpenAI.AuthenticationError).then(() => null),
  "unknown model": () => raised(() => client.chat.completions.create({ ...REQUEST, model: "other" }), (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found").then(() => null),
  "too long": () => raised(() => client.chat.completions.create({ ...REQUEST, max_tokens: TOO_LONG }), (error) => error.code === "context_length_exceeded").then(() => null),
});
