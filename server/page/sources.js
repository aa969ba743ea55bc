/** The server's folders of documents, where it has some: their state, their search, and a place in them. */

import { ApiError, call, get, stream } from "./api.js";
import { figure } from "./dom.js";
import { asksFirst } from "./models.js";
import { scopeField, scopeQuery } from "./settings.js";

/**
 * @typedef {{path: string, state: "indexed"|"failed"|"skipped", error?: string, chunks?: number,
 *   by_words?: number, left_out?: Object<string, number>}} File  left_out: letters that no part has, by kind, and damaged_pages
 * @typedef {{path: string, state: "opening"|"reading"|"embedding"|"ready"|"failed", error?: string,
 *   progress: {unit: "files"|"documents", done: number, total: number}, files: File[], questions?: string[], advice?: string,
 *   not_read?: number}} Collection
 *   progress, questions, not_read: of all collections together
 * @typedef {{id: string, title: string, text: string, path: string, page: number|null, places: {path: string,
 *   page: number|null}[], neighbours: {offset: number, id: string, title: string, text: string}[]}} Place
 */

let known = null;
let tell = () => {};

/** Set what is called when the collections may have changed. @param {() => void} listener */
export function onCollections(listener) {
  tell = listener;
}

function keep(collections) {
  known = collections;
  tell();
  return known;
}

/** @returns {Collection[]|null} the collections as they were last seen, without their files; null: the model asked has none */
export function collections() {
  return asksFirst() ? known : null;
}

/** Ask for the collections of a server that has some. @returns {Promise<Collection[]|null>} */
export async function loadCollections() {
  try {
    return keep((await get(`v1/sources${scopeQuery({ limit: 1 })}`)).collections);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    return keep(null); // this server has no such route, or no folder for this scope
  }
}

/** Forget the collections: the server has none. @returns {null} */
export function dropCollections() {
  return keep(null);
}

/**
 * @param {string} [after]  a path: the files behind it
 * @returns {Promise<{collections: Collection[], next: string|null}>} the first files, and the path to go on after
 */
export async function loadFiles(after) {
  const found = await get(`v1/sources${scopeQuery({ after })}`);
  keep(found.collections);
  return found;
}

/** @returns {string[]} questions to begin with: none while files are read that may hold the answers */
export function suggested() {
  const read = (collections() ?? []).filter(({ state }) => state === "ready" || state === "embedding");
  return read[0]?.questions ?? [];
}

/** @param {File} file  that was read @returns {string} its parts, and what is left out of it */
export function inWords({ chunks, by_words: words, left_out: left = {} }) {
  const parts = `${figure(chunks)} ${chunks === 1 ? "part" : "parts"}`;
  const byWords = words ? [`${figure(words)} found by words alone`] : [];
  const size = (kind, number) => kind === "damaged_pages" ? figure(number) : `${figure(number)} letters`;
  const kinds = Object.entries(left).map(([kind, number]) => `without ${kind.replaceAll("_", " ")} (${size(kind, number)})`);
  return [parts, ...byWords, ...kinds].join(", ");
}

/** @returns {string} the collections in words */
export function summary() {
  const [{ state, progress, not_read: left }] = known;
  const files = [`${figure(progress.total)} ${progress.total === 1 ? "file" : "files"}`, left && `${figure(left)} not read`].filter(Boolean).join(", ");
  const share = `${figure(progress.done)} of ${figure(progress.total)}`;
  return {
    opening: "being opened",
    reading: `${share} files read`,
    embedding: `vectors of ${share} documents`,
    ready: progress.total ? files : "no files yet",
    failed: "cannot be read",
  }[state];
}

/**
 * @param {{state: string, unit: string, done: number, total: number}|undefined} index  of an answer's report
 * @returns {string} what the answer could not know yet; nothing for an index that held all files
 */
export function missing(index) {
  if (!index || index.state === "embedding") return "";
  if (index.state === "failed") return "The folder could not be read again: newer changes are missing in this answer.";
  if (index.total && index.done === index.total) return "";
  const share = index.total ? ` (${figure(index.done)} of ${figure(index.total)} files)` : "";
  return `The folder was still being read when this was asked${share}. Ask again for an answer from all of it.`;
}

/** @param {{path: string, page?: number|null}} place @returns {string} */
export function placeText({ path, page }) {
  return page ? `${path}, page ${page}` : path;
}

/** @param {{id: string, title?: string, path?: string, page?: number|null}} source @returns {string} what a reader knows it by */
export function nameOf(source) {
  return source.title || (source.path ? placeText(source) : source.id);
}

/** Let the server look for changed files. */
export async function refresh() {
  await call("v1/sources/refresh", { body: scopeField() });
}

/** @param {string} id  of a document @returns {Promise<Place>} */
export function place(id) {
  return get(`v1/sources/${encodeURIComponent(id)}${scopeQuery()}`);
}

/**
 * Search with what is typed so far; the server begins to read what it finds.
 * @param {string} query
 * @param {string} id  of the turn to come
 * @param {object} chat  the turn's request, without its question
 * @param {AbortSignal} signal
 * @param {(results: {id: string, title: string}[]) => void} show  called at each stage
 */
export async function searchAhead(query, id, chat, signal, show) {
  const body = { query, speculate: id, chat, ...scopeField() };
  try {
    for await (const { results } of stream("v1/search", body, signal)) show(results);
  } catch {
    // only a favour: the question itself tells of errors
  }
}
