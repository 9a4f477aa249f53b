// The AI SDK with its three providers for servers like this one.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";
import {
  CALLER, CALLER_URL, FUNCTION, KEY, LENGTH, MODEL, PARAMETERS, QUESTION, REPLY, SCHEMA, URL,
  check, embedded, planet, raised, run, same,
} from "./checks.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;

function models(model = MODEL, baseURL = URL, apiKey = KEY) {
  const openai = createOpenAI({ baseURL, apiKey });
  const compatible = createOpenAICompatible({ name: "headrace", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true });
  return [compatible(model), openai.chat(model), openai.responses(model), createAnthropic({ baseURL, apiKey })(model)];
}

const ASKED = { prompt: QUESTION, temperature: 0, maxOutputTokens: LENGTH, maxRetries: 0 };

async function each(call, made = models()) {
  const found = [];
  for (const model of made) found.push(await call(model));
  for (const one of found) same(one, found[0]);
  return found[0];
}

async function chat() {
  return each(async (model) => {
    const { text, usage } = await generateText({ model, ...ASKED });
    check(usage.outputTokens > 0 && usage.outputTokens <= LENGTH, usage);
    return text;
  });
}

async function stream() {
  return each(async (model) => {
    const streamed = streamText({ model, ...ASKED });
    let text = "";
    for await (const piece of streamed.textStream) text += piece;
    check((await streamed.usage).outputTokens > 0, "no usage");
    return text;
  });
}

async function tools() {
  const asked = [];
  const weather = tool({ description: FUNCTION.description, inputSchema: jsonSchema(PARAMETERS), execute: async (given) => (asked.push(given), "sunny") });
  await each(async (model) => {
    const request = { model, prompt: "?", tools: { weather }, stopWhen: stepCountIs(3), maxOutputTokens: 200 };
    same((await generateText(request)).text, REPLY);
    same(await streamText(request).text, REPLY);
  }, models(CALLER, CALLER_URL));
  same(asked, Array(8).fill({ city: "Bern" }));
}

async function schema() {
  for (const model of models()) {
    const request = { model, ...ASKED, maxOutputTokens: 100, schema: jsonSchema(SCHEMA) };
    planet((await generateObject(request)).object);
    const streamed = streamObject(request);
    let last;
    for await (const partial of streamed.partialObjectStream) last = partial;
    planet(same(await streamed.object, last));
  }
}

async function embeddings() {
  const made = [
    createOpenAI({ baseURL: URL, apiKey: KEY }).embedding(MODEL),
    createOpenAICompatible({ name: "headrace", baseURL: URL, apiKey: KEY }).textEmbeddingModel(MODEL),
  ];
  return each(async (model) => embedded((await embedMany({ model, values: [QUESTION, "?"] })).embeddings[0]), made);
}

function status(number, made) {
  return async () => {
    for (const model of made) await raised(() => generateText({ model, ...ASKED }), (error) => error.statusCode === number);
  };
}

await run({
  chat,
  stream,
  "agent with a tool": tools,
  "JSON schema as an object": schema,
  embeddings,
  "wrong key": status(401, models(MODEL, URL, "wrong")),
  "unknown model": status(404, models("other")),
});
