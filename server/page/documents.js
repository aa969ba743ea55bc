/** Files that the reader brings: read by the server, and small ones then documents of a question; large ones it searches. */

import { call, get } from "./api.js";
import { modelField } from "./models.js";
import { scopeQuery } from "./settings.js";

/**
 * @typedef {{id: string, title: string, text: string}} Document
 * @typedef {{id: string, name: string, gone?: boolean}} Searched  a file that the server keeps for a while, and searches
 */

/**
 * Have a file read. Its name becomes its document's id; the same name with another text gets a number.
 * @param {File} file
 * @param {Document[]} known  the documents of the chat so far
 * @param {AbortSignal} signal
 * @returns {Promise<{document?: Document, searched?: Searched}>}
 */
export async function readFile(file, known, signal) {
  const query = scopeQuery({ filename: file.name, search: "auto", ...modelField() });
  const { id, name, parts } = await (await call(`v1/documents/read${query}`, { file, signal })).json();
  if (id) return { searched: { id, name } };
  const text = parts.map(textOf).join("\n\n");
  return { document: { id: freeId(name, text, known), title: name, text } };
}

/** The text of a part, behind its headings if the part before it had others. */
function textOf({ title, text }, at, parts) {
  return title && title !== parts[at - 1]?.title ? `# ${title}\n\n${text}` : text;
}

/** @param {Searched} searched @returns {Promise<boolean>} whether the server has forgotten it */
export async function isGone({ id }) {
  return get(`v1/documents/${id}${scopeQuery()}`).then(() => false, ({ status }) => status === 404);
}

/** Let the server forget a file. @param {Searched} searched @param {boolean} [keepalive]  although the page goes */
export async function forgetFile({ id }, keepalive = false) {
  await call(`v1/documents/${id}${scopeQuery()}`, { method: "DELETE", keepalive }).catch(() => {}); // it may have forgotten it before
}

function freeId(name, text, known) {
  const stem = name.replace(/\.[^.]+$/, "").replace(/[[\]\s]+/g, "-").slice(0, 60) || "document";
  for (let number = 1; ; number += 1) {
    const id = number === 1 ? stem : `${stem}-${number}`;
    const other = known.find((document) => document.id === id);
    if (!other || other.text === text) return id;
  }
}

/**
 * Take files that are dropped anywhere on the page.
 * @param {(files: FileList) => void} take
 */
export function acceptDrops(take) {
  const isFiles = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!isFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  addEventListener("drop", (event) => {
    if (!isFiles(event)) return;
    event.preventDefault();
    document.body.classList.remove("dropping");
    take(event.dataTransfer.files);
  });
}
