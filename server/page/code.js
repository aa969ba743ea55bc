/** Blocks of code: their head with a button, and their colours, by a library that is loaded with the first one. */

import DOMPurify from "./vendor/purify.mjs";
import { copy } from "./clipboard.js";
import { button, h } from "./dom.js";
import { whenNear } from "./nearby.js";

const MOST = 20_000; // characters of a block that gets colours
const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };

/**
 * Give the blocks of code in a fragment their head.
 * @param {DocumentFragment} fragment
 * @param {boolean} isFinished  they get their colours, too
 */
export function dressCode(fragment, isFinished) {
  for (const block of fragment.querySelectorAll("pre")) {
    const code = block.querySelector("code") ?? block;
    const language = /language-([\w+#.-]+)/.exec(code.className)?.[1] ?? "";
    const own = button("Copy", () => copy(said(code), own));
    block.tabIndex = 0; // it may scroll
    const around = h("div.code", {}, h("div.tools", {}, h("span", {}, language), own));
    block.replaceWith(around);
    around.append(block);
    if (isFinished && language && code.textContent.length <= MOST) whenNear(block, () => colour(code, language).catch(() => {}));
  }
}

/** The text of a code as its answer has it: without the numbers of citations. */
function said(code) {
  const copied = code.cloneNode(true);
  for (const citation of copied.querySelectorAll(".cite")) citation.replaceWith(citation.dataset.said);
  return copied.textContent;
}

async function colour(code, language) {
  const { default: library } = await import("./vendor/highlight.mjs");
  if (!library.getLanguage(language) || code.childElementCount) return; // a citation stands in it
  const text = code.textContent;
  const coloured = DOMPurify.sanitize(library.highlight(text, { language, ignoreIllegals: true }).value, COLOURS);
  if (coloured.textContent === text) code.replaceChildren(coloured);
}
