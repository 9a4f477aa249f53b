// What a chat asks for beside its messages. A field that is empty is left to the server.

import { byId, element } from "./dom.js";

const form = byId("settings");
const toggle = byId("settings-toggle");

toggle.addEventListener("click", () => {
  form.hidden = !form.hidden;
  toggle.setAttribute("aria-expanded", String(!form.hidden));
  if (!form.hidden) form.elements.system.focus();
});
form.addEventListener("submit", (event) => event.preventDefault());

export function asked() {
  const { model, system, temperature, max_tokens } = form.elements;
  const body = {};
  if (model.value) body.model = model.value;
  if (temperature.value !== "") body.temperature = Number(temperature.value);
  if (max_tokens.value !== "") body.max_completion_tokens = Number(max_tokens.value);
  return { system: system.value.trim(), body };
}

// The model and the adapters that can stand in its place, and what the server takes where nothing is asked for.
export function offer(names, advised) {
  const { model, temperature } = form.elements;
  temperature.placeholder = String(advised.temperature ?? 1);
  if (names.join("\n") === Array.from(model.options, (option) => option.value).join("\n")) return;
  const chosen = model.value;
  model.replaceChildren(...names.map((name) => element("option", { value: name, selected: name === chosen }, name)));
  byId("model-field").hidden = names.length < 2;
}
