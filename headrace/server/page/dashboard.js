// The engine's statistics, which the server sends twice a second while the page is open.

import { address } from "./address.js";
import * as bars from "./bars.js";
import { follow } from "./block_map.js";
import { byId, element, say } from "./dom.js";
import { number, percent, seconds, si, whole } from "./format.js";
import { Plot, SPAN, setNow } from "./plots.js";
import * as roofline from "./roofline.js";
import { offer } from "./settings.js";

const STATES = {
  ready: "ready",
  loading: "loading the model",
  stalled: "the engine does not respond",
  dead: "the engine has ended",
  closed: "the server is shutting down",
  draining: "the server is shutting down",
};

let latest = null;
let history = []; // the last SPAN seconds, oldest first

const plots = byId("plots");
const short = (value, isTick) => (isTick ? si(value).replace(" ", "") : number(value));
const share = (value, isTick) => (isTick ? `${Math.round(100 * value)} %` : percent(value));
const time = (value, isTick) => (isTick && value >= 1 ? `${value} s` : isTick ? `${Math.round(1000 * value)} ms` : seconds(value));
const counts = (value, isTick) => (isTick && !Number.isInteger(value) ? "" : whole(value));

const speed = new Plot(plots, {
  title: "Tokens/s",
  series: [{ label: "out", colour: 0 }, { label: "rows", colour: 1 }],
  show: short,
  minTop: 10,
});
const queue = new Plot(plots, {
  title: "Sequences",
  series: [{ label: "running", colour: 0 }, { label: "waiting", colour: 1 }],
  show: counts,
  minTop: 4,
});
const memory = new Plot(plots, {
  title: "KV",
  series: [{ label: "held", colour: 0 }, { label: "cached", colour: 2 }],
  show: share,
  minTop: 0.04,
});
const firstToken = new Plot(plots, {
  title: "Time to first token",
  series: [{ label: "", colour: 0, points: true }],
  show: time,
  minTop: 0.05,
});
const perStep = new Plot(plots, {
  title: "Tokens per step",
  series: [{ label: "", colour: 0 }],
  show: short,
  minTop: 2,
});
const drafts = new Plot(plots, {
  title: "Drafts accepted",
  series: [{ label: "", colour: 3 }],
  show: share,
  minTop: 1,
  absent: "none",
});

export function watch() {
  const source = new EventSource(address("stats/stream"));
  source.onmessage = ({ data }) => take(JSON.parse(data));
  source.onerror = () => state("away", "the server cannot be reached");
}

function take(stats) {
  const before = latest;
  latest = stats;
  history = [...history.filter((one) => one.time > stats.time - SPAN), point(stats, before)];
  describe(stats);
  if (document.hidden) return;
  draw(stats);
  bars.show(stats);
  roofline.show(stats.roofline);
  follow(stats);
}

// The changes since the last event, per step if there were steps.
function point({ time: now, figures: f, restarts }, before) {
  const same = before && before.restarts === restarts;
  const gained = (name) => (same ? f[name] - before.figures[name] : 0);
  const steps = gained("steps");
  return {
    time: now,
    speed: f.tokens_per_second ?? 0,
    rows: f.rows_per_second ?? 0,
    running: f.running ?? 0,
    waiting: f.waiting ?? 0,
    held: f.occupancy ?? 0,
    cached: f.blocks_total ? f.blocks_cached / f.blocks_total : 0,
    tokensPerStep: steps > 0 ? gained("tokens") / steps : null,
    accepted: gained("drafted") > 0 ? gained("accepted") / gained("drafted") : null,
  };
}

function draw(stats) {
  setNow(stats.time);
  const times = history.map((one) => one.time);
  const of = (name) => history.map((one) => one[name]);
  speed.draw([times, of("speed"), of("rows")]);
  queue.draw([times, of("running"), of("waiting")]);
  memory.draw([times, of("held"), of("cached")]);
  perStep.draw([times, of("tokensPerStep")]);
  drafts.draw([times, of("accepted")]);
  firstToken.draw([stats.first_tokens.map(([came]) => came), stats.first_tokens.map(([, after]) => after)]);
}

function describe(stats) {
  state(stats.status, STATES[stats.status] ?? stats.status);
  const { engine, model, figures: f } = stats;
  document.title = `${model} · Headrace`;
  offer([model, ...Object.keys(stats.adapters)], stats.advised_sampling);
  if (!engine) return;
  const words = [model, engine.architecture, `${engine.backend}, ${engine.threads} ${engine.threads === 1 ? "thread" : "threads"}`];
  if (engine.lossy) words.push(`lossy: ${engine.lossy} (${engine.mode_price})`);
  words.push(`${si(engine.weight_bytes)}B of weights`, `${engine.kv_dtype} KV`, `${whole(engine.max_model_len)} tokens of context`);
  say(byId("model"), words.join(" · "));
  totals({
    "output tokens": whole(f.tokens ?? 0),
    "prompt tokens": whole(f.prompt_tokens ?? 0),
    "cached prompt tokens": whole(f.cached_tokens ?? 0),
    "steps": whole(f.steps ?? 0),
    "finished requests": whole(f.finished ?? 0),
    "aborted requests": whole(f.aborted ?? 0),
    "preemptions": whole(f.preemptions ?? 0),
    "uptime": seconds(Math.max(1, stats.time - stats.started)),
    ...drafted(stats.drafts),
  });
}

function drafted(methods) {
  const used = Object.entries(methods).filter(([, { proposed }]) => proposed);
  return Object.fromEntries(used.map(([name, { proposed, accepted }]) => [`accepted drafts, ${name}`, `${whole(accepted)} of ${whole(proposed)}`]));
}

function totals(figures) {
  const list = byId("totals");
  for (const [name, words] of Object.entries(figures)) {
    const id = `total-${name.replaceAll(/\W/g, "-")}`;
    if (!byId(id)) list.append(element("div", {}, element("dt", {}, name), element("dd", { id })));
    say(byId(id), words);
  }
}

function state(name, words) {
  byId("state").dataset.state = name;
  say(byId("state").querySelector(".words"), words);
}
