// KV blocks by request: one cell per block in memory order, coloured by request, filled up to its last KV entry.

import { address } from "./address.js";
import { byId, say } from "./dom.js";
import { percent, whole } from "./format.js";
import { colour, onThemeChange, seriesColour } from "./theme.js";

const PERIOD = 900; // minimum milliseconds between two requests of the map
const HEIGHT = 168;
const LABEL = 14; // pixels above each of several grids
const MIN_BLOCKS = 256;
const MAX_CELL = 22;

const canvas = byId("blocks");
const value = byId("blocks-value");
const note = byId("blocks-note");
let map = null;
let grids = [];
let seen = ""; // figures at the time of the last map
let next = 0; // earliest time of the next request

// Requests the map if the figures show that it has changed.
export async function follow({ figures: f, restarts, status }) {
  const figures = [f.steps, f.blocks_free, f.blocks_cached, f.running, restarts].join();
  const now = performance.now();
  if (figures === seen || now < next || status !== "ready" || !canvas.clientWidth) return;
  next = now + PERIOD;
  try {
    const response = await fetch(address("stats/blocks"));
    if (!response.ok) return;
    map = await response.json();
    seen = figures;
    draw();
  } catch {
    // the stream of statistics reports that the server is away
  }
}

function draw() {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (!width) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(HEIGHT * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, HEIGHT);
  if (!map) return;
  const share = HEIGHT / map.groups.length;
  const label = map.groups.length > 1 ? LABEL : 0;
  grids = map.groups.map((group, i) => layOut(group, width, share - label, i * share + label));
  grids.forEach((grid) => {
    if (label) {
      context.fillStyle = colour("faint");
      context.font = "10px system-ui, sans-serif";
      context.fillText(`${grid.group.layers} layers, ${grid.group.window ? `last ${whole(grid.group.window)} tokens` : "all tokens"}`, 0, grid.top - 4);
    }
    paint(context, grid);
  });
  describe();
}

// Shows the blocks up to the last one ever used, rounded up to a power of two, so that cells stay visible in a large pool.
function layOut(group, width, height, top) {
  let last = 0;
  const look = (runs) => each(runs, (first, count) => (last = Math.max(last, first + count)));
  group.holdings.forEach((holding) => look(holding.runs));
  look(group.cached);
  const shown = Math.min(group.num_blocks, Math.max(MIN_BLOCKS, 2 ** Math.ceil(Math.log2(Math.max(1, last)))));
  let pitch = Math.min(MAX_CELL, Math.sqrt((width * height) / shown));
  while (Math.floor(width / pitch) * Math.floor(height / pitch) < shown) pitch *= 0.99;
  const columns = Math.floor(width / pitch);
  return { group, shown, pitch, columns, top, owners: owners(group) };
}

function owners(group) {
  const found = new Map();
  for (const { request, computed, released, runs } of group.holdings) {
    let position = released;
    each(runs, (first, count) => {
      for (let block = first; block < first + count; block += 1, position += 1) {
        const filled = Math.min(1, Math.max(0, (computed - position * map.block_size) / map.block_size));
        const known = found.get(block);
        if (known) {
          known.holders += 1;
          known.filled = Math.max(known.filled, filled);
        } else found.set(block, { request, filled, holders: 1 });
      }
    });
  }
  return found;
}

function paint(context, { group, shown, pitch, columns, top, owners: held }) {
  const gap = pitch >= 5 ? 1 : 0;
  const side = pitch - gap;
  const at = (block) => [(block % columns) * pitch, top + Math.floor(block / columns) * pitch];
  const cells = (blocks, style) => {
    context.fillStyle = style;
    for (const block of blocks) context.fillRect(...at(block), side, side);
  };
  cells(Array(shown).keys(), colour("cell"));
  each(group.cached, (first, count) => cells(range(first, Math.min(count, shown - first)), colour("cell-cached")));
  for (const [block, { request, filled, holders }] of held) {
    const [x, y] = at(block);
    const ink = seriesColour(Number(request) || 0);
    context.fillStyle = ink;
    context.globalAlpha = 0.28;
    context.fillRect(x, y, side, side);
    context.globalAlpha = 1;
    context.fillRect(x, y + side * (1 - filled), side, side * filled);
    if (holders > 1 && pitch >= 5) {
      context.fillStyle = colour("panel");
      context.fillRect(x + side * 0.35, y + side * 0.35, side * 0.3, side * 0.3);
    }
  }
}

function describe() {
  const held = grids.reduce((sum, grid) => sum + grid.owners.size, 0);
  const total = grids.reduce((sum, grid) => sum + grid.group.num_blocks, 0);
  const cached = grids.reduce((sum, grid) => sum + count(grid.group.cached), 0);
  say(value, `${percent(held / total)} of ${whole(total)}`);
  const parts = [`${whole(held)} held, ${whole(cached)} cached for prefixes`];
  const [grid] = grids;
  if (grid.shown < grid.group.num_blocks) parts.push(`first ${whole(grid.shown)} shown, the rest were never used`);
  say(note, parts.join("; "));
}

canvas.addEventListener("pointermove", (event) => {
  const { left, top } = canvas.getBoundingClientRect();
  const grid = grids.findLast((one) => event.clientY - top >= one.top);
  if (!grid) return;
  const row = Math.floor((event.clientY - top - grid.top) / grid.pitch);
  const column = Math.floor((event.clientX - left) / grid.pitch);
  const block = row * grid.columns + column;
  const owner = grid.owners.get(block);
  if (column >= grid.columns || block >= grid.shown || !owner) return describe();
  const own = [...grid.owners.values()].filter((one) => one.request === owner.request).length;
  const shared = owner.holders > 1 ? `, shared by ${owner.holders} sequences` : "";
  say(note, `block ${whole(block)}: request ${owner.request}, which holds ${whole(own)}${shared}`);
});
canvas.addEventListener("pointerleave", () => map && describe());

function each(runs, take) {
  for (let i = 0; i < runs.length; i += 2) take(runs[i], runs[i + 1]);
}

function count(runs) {
  let sum = 0;
  each(runs, (_, length) => (sum += length));
  return sum;
}

function* range(first, length) {
  for (let i = first; i < first + length; i += 1) yield i;
}

new ResizeObserver(draw).observe(canvas);
onThemeChange(draw);
