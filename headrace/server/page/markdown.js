// Renders Markdown: paragraphs, headings, lists, quotes, code, bold, italics. HTML stays text.

import { element } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*(\S(?:.*?\S)?)\*/g;

// Shows a growing text; only changed blocks are rendered again.
export class Markdown {
  constructor(root) {
    this.root = root;
    this.shown = [];
  }

  show(text) {
    const found = blocks(text);
    found.forEach((block, i) => {
      const source = `${block.kind}\n${block.lines.join("\n")}`;
      if (this.shown[i] === source) return;
      const node = MAKE[block.kind](block);
      if (i < this.shown.length) this.root.children[i].replaceWith(node);
      else this.root.append(node);
      this.shown[i] = source;
    });
    while (this.shown.length > found.length) {
      this.root.lastElementChild.remove();
      this.shown.pop();
    }
  }
}

function blocks(text) {
  const found = [];
  let fence = null;
  let blank = true;
  const add = (kind, line) => {
    const last = found.at(-1);
    if (last?.kind === kind && !blank && kind !== "heading" && kind !== "code") last.lines.push(line);
    else found.push({ kind, lines: [line] });
    blank = false;
  };
  for (const line of text.split("\n")) {
    if (fence) {
      if (line.trim().startsWith(fence) && !line.trim().slice(fence.length).trim()) fence = null;
      else found.at(-1).lines.push(line);
      continue;
    }
    const opened = FENCE.exec(line);
    if (opened) {
      fence = opened[1];
      found.push({ kind: "code", lines: [opened[2]] });
      blank = true;
    } else if (!line.trim()) {
      blank = found.at(-1)?.kind !== "list"; // an empty line does not end a list
      if (!blank) found.at(-1).loose = true;
    } else if (HEADING.test(line)) add("heading", line);
    else if (ITEM.test(line)) add("list", line);
    else if (line.startsWith(">")) add("quote", line.replace(/^>\s?/, ""));
    else {
      const last = found.at(-1);
      if (last?.kind === "list" && (!last.loose || /^\s{2}/.test(line))) last.lines.push(line);
      else add("paragraph", line);
    }
  }
  return found;
}

const MAKE = {
  code: ({ lines: [language, ...lines] }) => element("pre", { "data-language": language || null, tabindex: "0" }, element("code", {}, lines.join("\n"))),
  heading: ({ lines: [line] }) => {
    const [, marks, words] = HEADING.exec(line);
    return element(`h${Math.min(6, marks.length + 3)}`, {}, ...inline(words));
  },
  quote: ({ lines }) => element("blockquote", {}, ...inline(lines.join("\n"))),
  paragraph: ({ lines }) => element("p", {}, ...inline(lines.join("\n"))),
  list: ({ lines }) => list(items(lines)),
};

function items(lines) {
  const found = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item) found.push({ indent: item[1].length, number: item[2], words: item[3] });
    else found.at(-1).words += `\n${line.trim()}`;
  }
  return found;
}

// Items indented more than the first form a nested list.
function list(all) {
  const [first] = all;
  const made = first.number ? element("ol", { start: first.number }) : element("ul");
  for (let i = 0; i < all.length; ) {
    const entry = element("li", {}, ...inline(all[i].words));
    let end = i + 1;
    while (end < all.length && all[end].indent > first.indent) end += 1;
    if (end > i + 1) entry.append(list(all.slice(i + 1, end)));
    made.append(entry);
    i = end;
  }
  return made;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [all, , code, bold, alsoBold, italic] = match;
    nodes.push(text.slice(end, match.index));
    if (code !== undefined) nodes.push(element("code", {}, code));
    else if (italic !== undefined) nodes.push(element("em", {}, ...inline(italic)));
    else nodes.push(element("strong", {}, ...inline(bold ?? alsoBold)));
    end = match.index + all.length;
  }
  nodes.push(text.slice(end));
  return nodes.filter((node) => node !== "");
}
