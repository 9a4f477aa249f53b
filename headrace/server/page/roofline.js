// The roofline of this machine with the engine's last steps (Williams et al. 2009).

import { byId, say } from "./dom.js";
import { percent, seconds, si, whole } from "./format.js";
import { colour, onThemeChange } from "./theme.js";

const HEIGHT = 168;
const MARGIN = { left: 38, right: 8, top: 8, bottom: 26 };
const TRAIL = 60;
const FONT = "10px system-ui, sans-serif";
const LABEL_HEIGHT = 11;
const LABEL_GAP = 6;

const canvas = byId("roofline");
const value = byId("roofline-value");
const note = byId("roofline-note");
let limits = null;
let trail = []; // the last steps, the latest at the end

export function show({ limits: known, standing }) {
  limits = known;
  if (!limits) {
    say(note, "This machine has not been measured: run `headrace doctor`, then restart the server.");
    return;
  }
  const last = trail.at(-1);
  if (standing && !(last && last.seconds === standing.seconds && last.bytes === standing.bytes)) {
    trail = [...trail.slice(-TRAIL + 1), standing];
    const rows = `${whole(standing.rows)} ${standing.rows === 1 ? "row" : "rows"}`;
    const depth = `about ${whole(standing.depth)} tokens of context each`;
    const rate = `${si(standing.bytes / standing.seconds)}B/s of ${si(limits.bandwidth)}B/s`;
    say(value, `${percent(standing.least_seconds / standing.seconds)} of the limit`);
    say(note, `${rows} in ${seconds(standing.seconds)}, ${depth}; ${si(standing.bytes)}B read: ${rate}`);
  } else if (!last) say(note, "No step has run since this page was opened.");
  draw();
}

function draw() {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (!width) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(HEIGHT * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = FONT;
  if (!limits) return;
  const scale = scales(width);
  axes(context, scale, width);
  roofs(context, scale);
  points(context, scale);
}

// Both axes are logarithmic: operations per byte, operations per second.
function scales(width) {
  const rates = Object.values(limits.rates);
  const maxRate = Math.max(...rates);
  const [x0, x1] = [0, Math.ceil(Math.log10((8 * maxRate) / limits.bandwidth))];
  const y1 = Math.log10(2.2 * maxRate);
  const y0 = Math.min(Math.floor(Math.log10(limits.bandwidth)), ...trail.map((one) => Math.floor(Math.log10(one.flops / one.seconds))));
  const [wide, high] = [width - MARGIN.left - MARGIN.right, HEIGHT - MARGIN.top - MARGIN.bottom];
  const x = (intensity) => MARGIN.left + (wide * (Math.log10(intensity) - x0)) / (x1 - x0);
  const y = (rate) => MARGIN.top + high * (1 - (Math.log10(rate) - y0) / (y1 - y0));
  return { x, y, x0, x1, y0, y1 };
}

function axes(context, { x, y, x0, x1, y0, y1 }, width) {
  context.lineWidth = 1;
  context.strokeStyle = colour("grid");
  context.fillStyle = colour("faint");
  context.textAlign = "center";
  for (let power = x0; power <= x1; power += 1) {
    const at = Math.round(x(10 ** power)) + 0.5;
    stroke(context, [at, MARGIN.top], [at, HEIGHT - MARGIN.bottom]);
    if (power < x1) context.fillText(whole(10 ** power), at, HEIGHT - MARGIN.bottom + 11);
  }
  context.textAlign = "right";
  for (let power = y0; power <= y1; power += 1) {
    const at = Math.round(y(10 ** power)) + 0.5;
    stroke(context, [MARGIN.left, at], [width - MARGIN.right, at]);
    context.fillText(si(10 ** power), MARGIN.left - 3, at + 3);
  }
  context.fillText("operations per byte", width - MARGIN.right, HEIGHT - 3);
  context.textAlign = "left";
  context.fillText("operations/s", MARGIN.left + 4, MARGIN.top + 8);
}

function roofs(context, { x, y, x0, x1 }) {
  const used = trail.at(-1)?.kind ?? "int8";
  const labels = []; // a label at the height of another goes to its left
  for (const [kind, rate] of Object.entries(limits.rates).sort(([one]) => (one === used ? 1 : -1))) {
    const ridge = Math.max(rate / limits.bandwidth, 10 ** x0);
    context.strokeStyle = context.fillStyle = colour(kind === used ? "ink" : "faint");
    context.lineWidth = kind === used ? 1.5 : 1;
    context.globalAlpha = kind === used ? 1 : 0.55;
    stroke(context, [x(10 ** x0), y(limits.bandwidth * 10 ** x0)], [x(ridge), y(rate)], [x(10 ** x1), y(rate)]);
    context.textAlign = "right";
    const at = y(rate) + (kind === used ? -4 : 11);
    const beside = labels.filter((one) => Math.abs(one.at - at) < LABEL_HEIGHT).map((one) => one.left - LABEL_GAP);
    const right = Math.min(x(10 ** x1) - 2, ...beside);
    context.fillText(kind, right, at);
    labels.push({ at, left: right - context.measureText(kind).width });
    context.globalAlpha = 1;
  }
}

function points(context, { x, y, x0 }) {
  trail.forEach((one, i) => {
    const [intensity, rate] = [Math.max(one.flops / one.bytes, 10 ** x0), one.flops / one.seconds];
    const last = i === trail.length - 1;
    context.fillStyle = context.strokeStyle = colour("series-0");
    context.globalAlpha = last ? 1 : 0.08 + (0.25 * i) / trail.length;
    if (last) {
      context.setLineDash([2, 2]);
      stroke(context, [x(intensity), y(rate)], [x(intensity), y(one.flops / one.least_seconds)]);
      context.setLineDash([]);
    }
    context.beginPath();
    context.arc(x(intensity), y(rate), last ? 4.5 : 2.5, 0, 2 * Math.PI);
    context.fill();
  });
  context.globalAlpha = 1;
}

function stroke(context, [x, y], ...rest) {
  context.beginPath();
  context.moveTo(x, y);
  for (const point of rest) context.lineTo(...point);
  context.stroke();
}

new ResizeObserver(draw).observe(canvas);
onThemeChange(draw);
