// Anthropic's client library for Node.
import Anthropic from "@anthropic-ai/sdk";
import {
  CALLER, CALLER_ROOT, FUNCTION, KEY, LENGTH, MESSAGES, MODEL, PARAMETERS, REPLY, ROOT, SCHEMA,
  check, planet, raised, run, same,
} from "./checks.mjs";

const client = new Anthropic({ baseURL: ROOT, apiKey: KEY, maxRetries: 0 });
const caller = new Anthropic({ baseURL: CALLER_ROOT, apiKey: KEY, maxRetries: 0 });
const REQUEST = { model: MODEL, messages: MESSAGES, max_tokens: LENGTH, temperature: 0 };
const TOOL = { name: FUNCTION.name, description: FUNCTION.description, input_schema: PARAMETERS };

async function chat() {
  const found = await client.messages.create(REQUEST);
  const { input_tokens } = await client.messages.countTokens({ model: MODEL, messages: MESSAGES });
  same(found.usage.input_tokens + (found.usage.cache_read_input_tokens ?? 0), input_tokens);
  return found.content[0].text;
}

async function stream() {
  const events = client.messages.stream(REQUEST);
  let text = "";
  events.on("text", (piece) => (text += piece));
  return same(await events.finalText(), text);
}

async function tools() {
  const request = { model: CALLER, max_tokens: 200, messages: MESSAGES, tools: [TOOL] };
  const whole = await caller.messages.create(request);
  const streamed = await caller.messages.stream(request).finalMessage();
  for (const found of [whole, streamed]) {
    const call = found.content.find((block) => block.type === "tool_use");
    same(call.input, { city: "Bern" });
    const told = [
      ...MESSAGES,
      { role: "assistant", content: found.content },
      { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "sunny" }] },
    ];
    same((await caller.messages.create({ ...request, messages: told })).content[0].text, REPLY);
  }
}

async function schema() {
  const output_config = { format: { type: "json_schema", schema: SCHEMA } };
  const found = await client.messages.create({ ...REQUEST, max_tokens: 100, output_config });
  planet(found.content[0].text);
}

await run({
  chat,
  stream,
  "agent with a tool": tools,
  "JSON schema as an object": schema,
  "wrong key": () => raised(() => new Anthropic({ baseURL: ROOT, apiKey: "wrong", maxRetries: 0 }).messages.create(REQUEST), (error) => error instanceof Anthropic.AuthenticationError).then(() => null),
  "unknown model": () => raised(() => client.messages.create({ ...REQUEST, model: "other" }), (error) => error instanceof Anthropic.NotFoundError).then(() => null),
});
