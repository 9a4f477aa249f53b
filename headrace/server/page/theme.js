// Colours of the style sheet, for drawing on a canvas.

const scheme = matchMedia("(prefers-color-scheme: dark)");
const known = new Map();

export function colour(name) {
  if (!known.has(name)) known.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return known.get(name);
}

export function onThemeChange(redraw) {
  scheme.addEventListener("change", () => {
    known.clear();
    redraw();
  });
}

const NUM_SERIES = 8;
export const seriesColour = (index) => colour(`series-${index % NUM_SERIES}`);
