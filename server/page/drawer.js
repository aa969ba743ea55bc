/** The panel at the side: a source at its place, or the files of the server's folder. */

import { button, fill, h } from "./dom.js";
import { collections, place, refresh } from "./sources.js";

const drawer = document.getElementById("drawer");
let opener = null;

/** Close the panel and give the focus back. */
export function closeDrawer() {
  if (drawer.hidden) return;
  drawer.hidden = true;
  document.body.classList.remove("with-drawer");
  opener?.focus();
}

function open(label, ...content) {
  if (drawer.hidden) opener = document.activeElement;
  drawer.setAttribute("aria-label", label);
  const close = button("Close", closeDrawer, { drawing: "close" });
  fill(drawer, h("div.head", {}, h("h2", {}, label), close), ...content);
  drawer.hidden = false;
  document.body.classList.add("with-drawer");
  close.focus();
}

/**
 * Show a document, at the words that an answer quotes.
 * @param {{id: string, title?: string, text?: string, path?: string, page?: number}} source
 * @param {string} [quote]
 */
export async function openSource(source, quote) {
  if (source.text !== undefined) {
    show(source, [], quote);
    return;
  }
  try {
    const found = await place(source.id);
    show({ ...source, ...found }, found.neighbours ?? [], quote);
  } catch (error) {
    open(source.title || source.id, h("p.notice", {}, `The source cannot be shown: ${error.message}`));
  }
}

function show(source, neighbours, quote) {
  const where = [source.path, source.page && `page ${source.page}`].filter(Boolean).join(", ");
  const own = h("div.passage.here", {}, marked(source.text, quote));
  const around = neighbours.map(({ title, text }) => h("div.passage", {}, h("h3", {}, title), text));
  const half = Math.ceil(around.length / 2);
  const text = h("div.text", { tabindex: "0" }, ...around.slice(0, half), own, ...around.slice(half));
  open(source.title || source.id, where ? h("p.where", {}, where) : null, text);
  (own.querySelector("mark") ?? own).scrollIntoView({ block: "center" });
}

/** Return a text with a quote marked, where the text has its words. */
function marked(text, quote) {
  const words = quote?.match(/[\p{L}\p{N}]+/gu) ?? [];
  if (!words.length || words.length > 200) return text;
  const match = new RegExp(words.join("[^\\p{L}\\p{N}]{1,20}"), "iu").exec(text);
  if (!match) return text;
  const end = match.index + match[0].length;
  return [text.slice(0, match.index), h("mark", {}, match[0]), text.slice(end)];
}

/** Show the files of the server's folder. */
export function openFolder() {
  const again = button("Look for changes", async () => {
    await refresh();
    openFolder();
  });
  open("Folder", ...(collections() ?? []).map(collectionView), h("p", {}, again));
}

function collectionView({ path, state, files }) {
  const rows = (files ?? []).map(({ path: name, state: own, error, chunks }) =>
    h("li", { data: { state: error ? "failed" : own } }, h("span", {}, name), h("span.soft", {}, error ?? told(own, chunks))));
  return h("section", {}, h("h3", {}, path), h("p.soft", {}, state), h("ul.files", {}, rows));
}

function told(state, chunks) {
  return chunks === undefined ? state : `${state}, ${chunks} ${chunks === 1 ? "part" : "parts"}`;
}
