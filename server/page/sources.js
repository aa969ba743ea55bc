/** The server's folder of documents, where it has one: its state, its search, and a place in it. */

import { ApiError, call, get, stream } from "./api.js";
import { scopeField, scopeQuery } from "./settings.js";

/**
 * @typedef {{path: string, state: string, progress?: number|{done: number, total: number},
 *   files: {path: string, state: string, error?: string, chunks?: number}[], questions?: string[]}} Collection
 */

let known = null;

/** @returns {Collection[]|null} the collections as they were last seen; null: the server has no folder */
export function collections() {
  return known;
}

/** Ask for the collections of a server that has some. @returns {Promise<Collection[]|null>} */
export async function loadCollections() {
  try {
    known = (await get(`v1/sources${scopeQuery()}`)).collections;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    known = null; // this server has no such route, or no folder
  }
  return known;
}

/** @returns {string} the collections in words */
export function summary() {
  const files = (known ?? []).flatMap((collection) => collection.files ?? []);
  const ready = files.filter(({ error }) => !error).length;
  const busy = (known ?? []).some(({ state }) => state !== "ready");
  return `${ready} ${ready === 1 ? "file" : "files"}${busy ? ", being read" : ""}`;
}

/** Let the server look for changed files. */
export async function refresh() {
  await call(`v1/sources/refresh`, { body: { ...scopeField() } });
  return loadCollections();
}

/**
 * @param {string} id  of a chunk
 * @returns {Promise<{id: string, title: string, text: string, path: string, page?: number,
 *   neighbours?: {id: string, title: string, text: string}[]}>}
 */
export function place(id) {
  return get(`v1/sources/${encodeURIComponent(id)}${scopeQuery()}`);
}

/**
 * Search with what is typed so far; the server begins to read what it finds.
 * @param {string} query
 * @param {string} id  of the turn to come
 * @param {AbortSignal} signal
 * @param {(results: {id: string, title: string}[]) => void} show  called at each stage
 */
export async function searchAhead(query, id, signal, show) {
  const body = { query, speculate: id, ...scopeField() };
  try {
    for await (const { results } of stream("v1/search", body, signal)) show(results);
  } catch {
    // only a favour: the question itself tells of errors
  }
}
