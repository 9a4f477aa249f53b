// Starts the parts of the page; a narrow screen shows one part at a time.

import "./chat.js";
import { watch } from "./dashboard.js";

const main = document.querySelector("main");
const tabs = document.querySelectorAll("[data-show]");
for (const tab of tabs) {
  tab.addEventListener("click", () => {
    main.dataset.shown = tab.dataset.show;
    for (const one of tabs) one.setAttribute("aria-pressed", String(one === tab));
  });
}

watch();
