// Small plots of the last two minutes with a common cursor, each with its present values as text.

import { element, say } from "./dom.js";
import { colour, onThemeChange, seriesColour } from "./theme.js";

export const SPAN = 120; // seconds
const HEIGHT = 92;
const FONT = "10px system-ui, sans-serif";

const plots = [];
let now = 0;

// `series`: label, number of the colour, and whether to draw points instead of a line. `show` formats a value.
// `minTop`: minimum upper end of the scale.
export class Plot {
  constructor(parent, { title, series, show, minTop, absent }) {
    this.series = series;
    this.show = show;
    this.absent = absent ?? "–";
    this.values = series.map(() => element("b", {}, "–"));
    const legend = series.map((one, i) =>
      element("span", { class: `key key-${one.colour}` }, one.label ? `${one.label} ` : "", this.values[i]),
    );
    const caption = element("figcaption", {}, element("h3", {}, title), element("output", {}, ...legend));
    this.box = element("div", { class: "plot", role: "img", "aria-label": `${title}, last two minutes` });
    parent.append(element("figure", { class: "panel" }, caption, this.box));
    this.plot = new uPlot(this.options(minTop), [[], ...series.map(() => [])], this.box);
    new ResizeObserver(() => this.fit()).observe(this.box);
    plots.push(this);
  }

  options(minTop) {
    const stroke = () => colour("faint");
    return {
      width: 200,
      height: HEIGHT,
      padding: [6, 4, 6, 0],
      legend: { show: false },
      cursor: { sync: { key: "engine" }, drag: { x: false, y: false }, y: false, points: { size: 5 } },
      scales: {
        x: { time: false, range: () => [now - SPAN, now] },
        y: { range: (_, __, max) => [0, Math.max(minTop, 1.08 * (max || 0))] },
      },
      axes: [
        { show: false },
        {
          size: 44,
          gap: 3,
          font: FONT,
          stroke,
          space: 26,
          grid: { stroke: () => colour("grid"), width: 1 },
          ticks: { show: false },
          values: (_, ticks) => ticks.map((tick) => this.show(tick, true)),
        },
      ],
      series: [{}, ...this.series.map((one) => line(one))],
      hooks: { setCursor: [() => this.tell()] },
    };
  }

  draw(data) {
    this.plot.setData(data);
    this.tell();
  }

  // Shows the values under the cursor, or the latest values.
  tell() {
    if (!this.plot) return;
    const at = this.plot.cursor.idx ?? this.plot.data[0].length - 1;
    this.values.forEach((node, i) => {
      const value = this.plot.data[i + 1][at];
      say(node, value === null || value === undefined ? this.absent : this.show(value, false));
    });
  }

  fit() {
    const width = Math.floor(this.box.clientWidth);
    if (width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }
}

function line({ colour: number, points }) {
  const stroke = () => seriesColour(number);
  if (points) return { stroke, width: 0, paths: () => null, points: { show: true, size: 5, stroke, fill: stroke } };
  return { stroke, width: 1.5, points: { show: false }, spanGaps: false };
}

export function setNow(time) {
  now = time;
}

onThemeChange(() => plots.forEach((one) => one.plot.redraw(false)));
