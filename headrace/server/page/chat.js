// The conversation. Each request sends all of it; the response is a stream.

import { address } from "./address.js";
import { byId, element, say } from "./dom.js";
import { events } from "./event_stream.js";
import { number, seconds } from "./format.js";
import { Markdown } from "./markdown.js";
import { requestOptions } from "./settings.js";

const NEAR_THE_END = 60; // pixels: a reader closer to the end than this follows new text

const log = byId("log");
const question = byId("question");
const send = byId("send");
const empty = log.querySelector(".empty");
let messages = [];
let running = null; // AbortController of the response in progress

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else ask();
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) ask();
});
question.addEventListener("input", fit);
byId("new-chat").addEventListener("click", () => {
  running?.abort();
  messages = [];
  log.replaceChildren(empty);
  question.focus();
});

function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

function ask() {
  const content = question.value.trim();
  if (!content) return;
  question.value = "";
  fit();
  empty.remove();
  log.querySelectorAll(".error button").forEach((button) => button.remove()); // only the last response can be retried
  log.append(element("article", { class: "message user", "aria-label": "You" }, element("p", {}, content)));
  messages.push({ role: "user", content });
  respond();
}

async function respond() {
  const view = new ResponseView();
  const conversation = messages;
  const controller = (running = new AbortController());
  setButton("Stop");
  try {
    await read(view, controller.signal);
  } catch (error) {
    if (controller.signal.aborted) view.reason = "stopped";
    else view.fail(error);
  } finally {
    if (view.content) conversation.push({ role: "assistant", content: view.content });
    view.end();
    if (running === controller) {
      running = null;
      setButton("Send");
    }
  }
}

function setButton(label) {
  say(send, label);
  send.classList.toggle("stops", label === "Stop");
}

async function read(view, signal) {
  const { system, body } = requestOptions();
  const all = system ? [{ role: "system", content: system }, ...messages] : messages;
  const response = await fetch(address("v1/chat/completions"), {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, messages: all, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await responseError(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw Object.assign(new Error(chunk.error.message), { code: chunk.error.code });
    view.take(chunk);
  }
  throw new Error("The response is incomplete: the server closed the connection.");
}

async function responseError(response) {
  try {
    const { error } = await response.json();
    return Object.assign(new Error(error.message), { code: error.code, status: response.status });
  } catch {
    return Object.assign(new Error(response.statusText || "The server refused the request."), { status: response.status });
  }
}

// One response in progress, drawn at most once per frame.
class ResponseView {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.reason = null;
    this.usage = null;
    this.timing = null; // seconds, measured by the server
    this.begun = performance.now();
    this.first = null;
    this.thought = element("div", { class: "thought" });
    this.folded = element("details", { class: "reasoning", hidden: true }, element("summary", {}, "Reasoning"), this.thought);
    this.text = element("div", { class: "text" });
    this.meta = element("p", { class: "meta" }, "…");
    this.root = element("article", { class: "message assistant", "aria-label": "Model", "aria-busy": "true" }, this.folded, this.text, this.meta);
    this.markdown = new Markdown(this.text);
    this.thinking = new Markdown(this.thought);
    log.append(this.root);
    log.scrollTop = log.scrollHeight;
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.timing) this.timing = chunk.timing;
    const [choice] = chunk.choices;
    if (!choice) return;
    const { content, reasoning, reasoning_content: thought } = choice.delta;
    if (content || reasoning || thought) {
      this.first ??= performance.now();
      this.content += content ?? "";
      this.reasoning += reasoning ?? thought ?? "";
      this.frame ??= requestAnimationFrame(() => this.draw());
    }
    this.reason = choice.finish_reason ?? this.reason;
  }

  draw() {
    this.frame = null;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_THE_END;
    this.folded.hidden = !this.reasoning;
    if (this.reasoning) this.thinking.show(this.reasoning.trim());
    this.markdown.show(this.content.trim());
    if (follows) log.scrollTop = log.scrollHeight;
  }

  fail(error) {
    const words = error instanceof TypeError ? "The server cannot be reached." : error.message;
    const detail = [error.status, error.code].filter(Boolean).join(" ");
    const again = element("button", { type: "button", class: "plain", onclick: () => this.retry() }, "Try again");
    const box = element("div", { class: "error", role: "alert" }, element("p", {}, words), element("p", { class: "meta" }, detail), again);
    this.meta.before(box);
    this.reason = "failed";
  }

  retry() {
    if (running) return;
    if (messages.at(-1)?.role === "assistant") messages.pop();
    this.root.remove();
    respond();
  }

  end() {
    if (this.frame) cancelAnimationFrame(this.frame);
    const taken = this.timing ? this.timing.decode + this.timing.detokenise : 0;
    const tokens = this.usage?.completion_tokens;
    const parts = [];
    if (tokens > 1 && taken > 0) parts.push(`${number((tokens - 1) / taken)} tokens/s`);
    if (this.first !== null) parts.push(`first token after ${seconds((this.first - this.begun) / 1000)}`);
    if (tokens) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    if (this.reason === "length") parts.push("stopped at max tokens");
    if (this.reason === "stopped") parts.push("stopped");
    say(this.meta, parts.join(" · "));
    this.root.setAttribute("aria-busy", "false");
    this.draw();
  }
}
