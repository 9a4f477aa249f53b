// Bars of parts that sum to a whole, and a table of the engine's last steps.

import { byId, element, say } from "./dom.js";
import { number, percent, seconds, si } from "./format.js";

const parent = byId("bars");

// `parts`: key, label and number of the colour; `show` formats a value.
class Bar {
  constructor({ title, name, parts, show }) {
    this.show = show;
    this.value = element("output", {}, "–");
    this.parts = parts.map(([key, label, colour]) => {
      const value = element("b", {}, "–");
      const item = element("li", { class: `key-${colour}` }, `${label} `, value);
      return { key, colour, value, item };
    });
    this.bar = element("div", { class: "stack", role: "img", "aria-label": name });
    const legend = element("ul", { class: "legend" }, ...this.parts.map(({ item }) => item));
    const caption = element("figcaption", {}, element("h3", {}, title), this.value);
    parent.append(element("figure", { class: "panel" }, caption, this.bar, legend));
  }

  draw(values) {
    const whole = this.parts.reduce((sum, { key }) => sum + (values[key] ?? 0), 0);
    if (!whole) return;
    say(this.value, this.show(whole));
    let end = 0;
    // A gradient, because boxes that grow would count as shifts of the layout.
    const stops = this.parts.map(({ key, colour, value }) => {
      const begin = end;
      end += (100 * (values[key] ?? 0)) / whole;
      say(value, this.show(values[key] ?? 0));
      return `var(--${colour === "none" ? "cell-cached" : `series-${colour}`}) ${begin}% ${end}%`;
    });
    this.bar.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
  }
}

const memory = new Bar({
  title: "Memory",
  name: "Memory by what holds it",
  parts: [
    ["weights", "weights", 0],
    ["KV held", "KV held", 1],
    ["KV cached", "KV cached", 2],
    ["KV free", "KV free", 6],
    ["runtime", "runtime", 7],
    ["rest", "rest", "none"],
  ],
  show: (bytes) => `${si(bytes)}B`,
});

const latency = new Bar({
  title: "Mean time of a request",
  name: "Time of a request by its parts",
  parts: [
    ["tokenise", "tokenise", 4],
    ["queue", "queue", 1],
    ["prefill", "prefill", 2],
    ["decode", "decode", 0],
    ["detokenise", "detokenise", 3],
    ["network", "network", 5],
  ],
  show: seconds,
});

const COLUMNS = ["last steps", "measured", "predicted", "error", "MBU", "MFU", "$ a million"];
const KINDS = { decode_steps: "decode", prompt_steps: "prompt" };

const rows = Object.fromEntries(
  Object.entries(KINDS).map(([kind, label]) => {
    const cells = COLUMNS.slice(1).map(() => element("td", {}, "–"));
    return [kind, { cells, row: element("tr", {}, element("th", { scope: "row" }, label), ...cells) }];
  }),
);
const head = element("tr", {}, ...COLUMNS.map((name) => element("th", { scope: "col" }, name)));
const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...Object.values(rows).map(({ row }) => row)));
const caption = element("figcaption", {}, element("h3", {}, "Steps"), element("output", {}));
parent.append(element("figure", { class: "panel steps" }, caption, element("div", { class: "scrolls" }, table)));

const roofs = (shares) => Object.values(shares).map(percent).join(" / ");

export function show({ memory: held, latency: parts, steps }) {
  memory.draw(held);
  latency.draw(parts);
  for (const [kind, { cells }] of Object.entries(rows)) {
    const use = steps[kind];
    if (!use) continue; // the last figures stay
    const error = use.error === null ? "–" : `${use.error > 0 ? "+" : ""}${Math.round(100 * use.error)} %`;
    const words = [seconds(use.seconds), seconds(use.predicted), error, roofs(use.mbu), roofs(use.mfu), number(use.dollars_per_million)];
    cells.forEach((cell, i) => say(cell, words[i]));
    const names = Object.keys(use.mbu).join(" / ");
    say(caption.querySelector("output"), `shares of the ${names} roof`);
  }
}
