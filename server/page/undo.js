/** What was just deleted, and may be taken back for some seconds. */

import { button, h } from "./dom.js";

const FOR = 8000; // ms
const shown = document.getElementById("deleted");
/** @type {Set<(isGoing: boolean) => void>} what ends each of them for good */
const pending = new Set();

/**
 * Offer to take something back.
 * @param {string} text  what was deleted
 * @param {() => void} back
 * @param {(isGoing: boolean) => void} end  called once it can no longer be taken back. isGoing: the page goes
 */
export function offerBack(text, back, end) {
  const leave = () => {
    clearTimeout(timer);
    pending.delete(finish);
    row.remove();
  };
  const finish = (isGoing) => {
    leave();
    end(isGoing);
  };
  const row = h("p", {}, h("span", {}, text), button("Take back", () => {
    leave();
    back();
    if (document.activeElement === document.body) document.getElementById("main").focus();
  }));
  const timer = setTimeout(() => finish(false), FOR);
  pending.add(finish);
  shown.append(row);
}

addEventListener("pagehide", () => {
  for (const finish of pending) finish(true);
});
