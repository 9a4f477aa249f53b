// Makes elements, never from markup: text of a model or a server stays text.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export const byId = (id) => document.getElementById(id);

// Writes text only if it differs, to avoid needless layout.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
