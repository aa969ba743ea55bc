/**
 * A chat: a tree of turns, of which the reader sees one path.
 *
 * @typedef {{id: string, title?: string, text: string}} Document
 * @typedef {object} Turn
 * @property {string} id
 * @property {string|null} parent  the turn before
 * @property {string} question
 * @property {Document[]} documents  those that the reader attached
 * @property {boolean} retrieval  whether the server's folder is searched
 * @property {import("./documents.js").Searched[]} [searched]  files that are searched
 * @property {string} answer
 * @property {string} thought
 * @property {"running"|"done"|"stopped"|"failed"} state
 * @property {string} [error]
 * @property {boolean} [isTooLong]  for the model: the error
 * @property {string} [answerId]  the server's name of the answer
 * @property {boolean} [remembered]  whether the server can go on from it
 * @property {string} [model]  of several, the one that was asked
 * @property {string} [scope]  in which it was asked
 * @property {string} [why]  "again" or "edit": a branch
 * @property {object} [report]  `slotcache` of the answer
 * @property {object} [timings]
 * @property {object} [progress]  of the prompt, while it is computed
 *
 * @typedef {{id: string, title: string, created: number, updated: number, system: string, head: string|null,
 *   turns: Turn[], searched?: import("./documents.js").Searched[]}} Chat  searched: files for its next question
 */

import { brief } from "./dom.js";
import { askedModel } from "./models.js";

/** @param {string} system  the system prompt @returns {Chat} */
export function newChat(system) {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? randomId(), title: "", created: now, updated: now, system, head: null, turns: [] };
}

/** Where the page is not served securely, `randomUUID` is missing. */
function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Add a turn and make it the one that is seen.
 * @param {Chat} chat
 * @param {Pick<Turn, "parent"|"question"|"documents"|"searched"|"retrieval"> & {why?: string}} asked
 * @returns {Turn}
 */
export function addTurn(chat, asked) {
  const turn = { id: randomId(), answer: "", thought: "", state: "running", ...asked };
  chat.turns.push(turn);
  chat.head = turn.id;
  chat.title ||= brief(turn.question, 60) || "Documents";
  chat.updated = Date.now();
  return turn;
}

/** @type {Set<string>} the turns whose answers this page reads: nobody knows more of them */
export const live = new Set();
const STATES = ["running", "stopped", "failed", "done"]; // the later one is known where more is known

/**
 * Take into a chat what the same chat has elsewhere: its turns, and of turns in both the one of which more is known.
 * @param {Chat} chat
 * @param {Chat} other
 */
export function join(chat, other) {
  const own = new Map(chat.turns.map((turn) => [turn.id, turn]));
  for (const turn of other.turns) {
    const mine = own.get(turn.id);
    if (!mine) chat.turns.push(turn);
    else if (!live.has(turn.id) && isFurther(turn, mine)) Object.assign(mine, turn);
  }
}

function isFurther(one, other) {
  const ahead = STATES.indexOf(one.state) - STATES.indexOf(other.state);
  return ahead > 0 || (ahead === 0 && one.answer.length > other.answer.length);
}

/** Show the turns behind the one that is seen last, where another page shows these. @param {Chat} chat @param {Chat} other */
export function follow(chat, { head }) {
  if (seenTurns({ ...chat, head }).some(({ id }) => id === chat.head)) chat.head = head;
}

/** @param {Chat} chat @returns {Turn[]} the turns that are seen, first to last */
export function seenTurns(chat) {
  const byId = new Map(chat.turns.map((turn) => [turn.id, turn]));
  const path = [];
  for (let turn = byId.get(chat.head); turn; turn = byId.get(turn.parent)) path.unshift(turn);
  return path;
}

/** @param {Chat} chat @param {Turn} turn @returns {Turn[]} the turns in the same place, itself included */
export function siblings(chat, turn) {
  return chat.turns.filter((other) => other.parent === turn.parent);
}

/** Show another branch, down to its newest turn. @param {Chat} chat @param {Turn} turn */
export function switchTo(chat, turn) {
  let last = turn;
  for (let next = last; next; next = chat.turns.findLast((other) => other.parent === last.id)) last = next;
  chat.head = last.id;
}

/** @param {Chat} chat @param {Turn} turn @returns {Turn[]} the turns before it, first to last */
export function turnsBefore(chat, turn) {
  return seenTurns({ ...chat, head: turn.parent });
}

/**
 * Return the fields of a request that say what is asked.
 *
 * The server has the turns that the model asked remembers: only what stands behind the last of them is sent. Where there are
 * none, or it has forgotten them, the whole chat is. A turn that failed is never sent again.
 * @param {Chat} chat
 * @param {Turn} turn
 * @param {Map<string, Document>} [found]  the documents of earlier searches, by their ids: the whole chat is sent
 */
export function questionFields(chat, turn, found) {
  const before = turnsBefore(chat, turn);
  const asked = askedModel();
  const last = found ? -1 : before.findLastIndex(({ remembered, model }) => remembered && (model ?? "") === asked);
  const answered = before.slice(last + 1).filter(({ state }) => state !== "failed");
  const since = answered.flatMap((earlier) => [questionOf(earlier, found), answerOf(earlier)]);
  const retrieval = retrievalOf(turn);
  if (last >= 0) return { messages: [...since, questionOf(turn)], previous_response_id: before[last].answerId, ...retrieval };
  const system = chat.system ? [{ role: "system", content: chat.system }] : [];
  return { messages: [...system, ...since, questionOf(turn)], conversation: { id: chat.id, history: "whole" }, ...retrieval };
}

function retrievalOf({ retrieval, searched }) {
  if (searched?.length) return { retrieval: { documents: searched.map(({ id }) => id), folder: retrieval } };
  return retrieval ? { retrieval } : {};
}

/**
 * Return the fields of a request whose question is still being typed.
 * @param {Chat} chat
 * @param {Pick<Turn, "parent"|"documents">} draft
 */
export function fieldsToCome(chat, draft) {
  const { messages, ...fields } = questionFields(chat, { question: "", ...draft });
  return { ...fields, messages: messages.slice(0, -1), ...(draft.documents.length && { documents: draft.documents }) };
}

/**
 * @param {Chat} chat
 * @param {Turn} turn
 * @returns {{id: string, title: string, text?: string}[]} all that was found before a turn; of a file with its text
 */
export function foundBefore(chat, turn) {
  return turnsBefore(chat, turn).flatMap(foundIn);
}

function foundIn({ report }) {
  return report?.retrieved ?? [];
}

function questionOf(turn, found) {
  const searched = found ? foundIn(turn).map(({ id }) => found.get(id)) : [];
  const documents = [...turn.documents, ...searched.filter(Boolean)];
  return { role: "user", content: turn.question, ...(documents.length && { documents }) };
}

function answerOf(turn) {
  return { role: "assistant", content: turn.answer, ...(turn.thought && { reasoning_content: turn.thought }) };
}

/**
 * Return the document that an answer means by an id: attached, or found in the folder, in this turn or an earlier one.
 * @param {Chat} chat
 * @param {Turn} turn
 * @param {string} id
 * @returns {(Document & {path?: string, page?: number})|undefined}
 */
export function documentOf(chat, turn, id) {
  const known = [turn, ...turnsBefore(chat, turn).reverse()];
  return known.flatMap((one) => [...one.documents, ...(one.report?.retrieved ?? [])]).find((one) => one.id === id);
}
