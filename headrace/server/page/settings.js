// Options of a chat. If a field is empty, the server's default applies.

import { byId, element } from "./dom.js";

const form = byId("settings");
const toggle = byId("settings-toggle");

toggle.addEventListener("click", () => {
  form.hidden = !form.hidden;
  toggle.setAttribute("aria-expanded", String(!form.hidden));
  if (!form.hidden) form.elements.system.focus();
});
form.addEventListener("submit", (event) => event.preventDefault());

export function requestOptions() {
  const { model, system, temperature, max_tokens } = form.elements;
  const body = {};
  if (model.value) body.model = model.value;
  if (temperature.value !== "") body.temperature = Number(temperature.value);
  if (max_tokens.value !== "") body.max_completion_tokens = Number(max_tokens.value);
  return { system: system.value.trim(), body };
}

// Lists the model and its adapters, and shows the server's default temperature.
export function offer(names, advised) {
  const { model, temperature } = form.elements;
  temperature.placeholder = String(advised.temperature ?? 1);
  if (names.join("\n") === Array.from(model.options, (option) => option.value).join("\n")) return;
  const chosen = model.value;
  model.replaceChildren(...names.map((name) => element("option", { value: name, selected: name === chosen }, name)));
  byId("model-field").hidden = names.length < 2;
}
