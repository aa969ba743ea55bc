/** The panel at the side: a source at its place, or the files of the server's folder. */

import { button, fill, h } from "./dom.js";
import { inWords, loadFiles, nameOf, place, placeText, refresh, summary } from "./sources.js";

const LOOK_EVERY = 1000; // ms between two looks at folders that are being read
const LOOK_FOR = 10_000; // ms in which a change that the reader waits for is noticed
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
    show(source, quote);
    return;
  }
  try {
    const found = await place(source.id);
    show({ ...source, ...found }, quote);
  } catch (error) {
    open(nameOf(source), h("p.notice", {}, `The source cannot be shown: ${error.message}`));
  }
}

function show(source, quote) {
  const places = source.places ?? [source];
  const where = places.filter(({ path }) => path).map((one) => h("p.where", {}, placeText(one)));
  const own = h("div.passage.here", {}, marked(source.text, quote));
  const around = source.neighbours ?? [];
  const passages = (wanted) => around.filter(wanted).map(({ title, text }) => h("div.passage", {}, h("h3", {}, title), text));
  const text = h("div.text", { tabindex: "0" }, passages(({ offset }) => offset < 0), own, passages(({ offset }) => offset > 0));
  open(nameOf(source), ...where, text);
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

/** Show the files of the server's folders. */
export async function openFolder() {
  const shown = h("div.text", { tabindex: "0" });
  const look = () => refresh().then(() => showFiles(shown, performance.now() + LOOK_FOR));
  const again = button("Look for changes", () => look().catch((error) => tell(shown, error)));
  open("Folder", shown, h("p", {}, again));
  await showFiles(shown);
}

/** Show the first files, again and again while they are read, and until a time: the server looks for changes on its own. */
async function showFiles(shown, until = 0) {
  const page = await loadFiles().catch((error) => tell(shown, error));
  if (!page || !shown.isConnected) return;
  const advice = page.collections[0]?.advice;
  fill(
    shown,
    h("p.soft", { role: "status" }, summary()),
    advice ? h("p.soft", {}, advice) : null,
    page.collections.map(collectionView),
    isEmpty(page) && h("p", {}, EMPTY),
    more(page),
  );
  const isOver = page.collections.every(({ state }) => state === "ready") && performance.now() > until;
  if (!isOver) setTimeout(() => shown.isConnected && showFiles(shown, until), LOOK_EVERY);
}

const isRead = ({ state }) => state === "indexed";

const EMPTY = "There is no file here that the server reads. Put documents into this folder (PDF, DOCX, HTML, Markdown, text and more), " +
  "then look for changes.";

function isEmpty({ collections }) {
  return collections.every(({ state, files }) => state === "ready" && !files.length);
}

/** A button for the files behind a page of them. */
function more({ next }) {
  if (next === null) return null;
  const own = button("More files", async () => {
    const page = await loadFiles(next).catch((error) => tell(own, error));
    const filled = page?.collections.filter(({ files }) => files.length);
    if (page) own.replaceWith(...filled.map(collectionView), more(page) ?? "");
  });
  return own;
}

function tell(element, error) {
  fill(element, h("p.notice", {}, error.message));
}

function collectionView({ path, error, files }) {
  const rows = [...files].sort((one, other) => isRead(one) - isRead(other)).map((file) => h("li", { data: { state: file.state } }, h("span", {}, file.path),
    h("span.soft", {}, file.error ?? inWords(file))));
  return h("section", {}, h("h3", {}, path), error && h("p.notice", {}, error), h("ul.files", {}, rows));
}
