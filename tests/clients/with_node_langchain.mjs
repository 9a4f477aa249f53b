// LangChain.js with OpenAI's and Anthropic's classes.
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { createAgent } from "langchain";
import {
  CALLER, CALLER_ROOT, CALLER_URL, FUNCTION, KEY, LENGTH, MODEL, PARAMETERS, QUESTION, REPLY, ROOT, SCHEMA, URL,
  check, embedded, planet, raised, run, same,
} from "./checks.mjs";

function models({ model = MODEL, url = URL, root = ROOT, key = KEY, tokens = LENGTH } = {}) {
  const own = { model, apiKey: key, temperature: 0, maxTokens: tokens, maxRetries: 0 };
  const openai = { ...own, configuration: { baseURL: url } };
  return [
    new ChatOpenAI(openai),
    new ChatOpenAI({ ...openai, useResponsesApi: true }),
    new ChatAnthropic({ ...own, anthropicApiUrl: root }),
  ];
}

async function each(call, made = models()) {
  const found = [];
  for (const model of made) found.push(await call(model));
  for (const one of found) same(one, found[0]);
  return found[0];
}

async function chat() {
  return each(async (model) => {
    const found = await model.invoke(QUESTION);
    check(found.usage_metadata.output_tokens <= LENGTH, found.usage_metadata);
    return found.text;
  });
}

async function stream() {
  return each(async (model) => {
    let text = "";
    for await (const chunk of await model.stream(QUESTION)) text += chunk.text;
    return text;
  });
}

async function tools() {
  const asked = [];
  const weather = tool((given) => (asked.push(given), "sunny"), { name: FUNCTION.name, description: FUNCTION.description, schema: PARAMETERS });
  await each(async (model) => {
    const { messages } = await createAgent({ model, tools: [weather] }).invoke({ messages: [new HumanMessage("?")] });
    same(messages.at(-1).text, REPLY);
  }, models({ model: CALLER, url: CALLER_URL, root: CALLER_ROOT, tokens: 200 }));
  same(asked, Array(3).fill({ city: "Bern" }));
}

async function schema() {
  const made = models({ tokens: 100 });
  for (const model of made) planet(await model.withStructuredOutput(SCHEMA, { method: "jsonSchema" }).invoke(QUESTION));
  for (const model of made) planet(await model.withStructuredOutput(SCHEMA, { method: "functionCalling" }).invoke(QUESTION));
}

async function completion() {
  const model = new OpenAI({ model: MODEL, apiKey: KEY, temperature: 0, maxTokens: LENGTH, configuration: { baseURL: URL } });
  return model.invoke("Once upon a time");
}

async function embeddings() {
  const made = new OpenAIEmbeddings({ model: MODEL, apiKey: KEY, configuration: { baseURL: URL } });
  return embedded(await made.embedQuery(QUESTION));
}

function status(number, made) {
  return async () => {
    for (const model of made) await raised(() => model.invoke(QUESTION), (error) => error.status === number);
  };
}

await run({
  chat,
  stream,
  "agent with a tool": tools,
  "JSON schema as an object": schema,
  completion,
  embeddings,
  "wrong key": status(401, models({ key: "wrong" })),
  "unknown model": status(404, models({ model: "other" })),
});
