// Formats numbers, always with the same number of digits.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const whole = (value) => grouped.format(value);

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value >= 100 ? whole(value) : value >= 10 ? value.toFixed(1) : value.toFixed(value === 0 ? 0 : 2);
}

export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const value = 100 * share;
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 1) return `${number(1000 * value)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} days`;
}

export function si(value) {
  const units = ["", "k", "M", "G", "T", "P"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 99.5 || value === 0 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(2)} ${units[unit]}`;
}
