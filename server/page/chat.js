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
 * @property {boolean} [mayCome]  the server may have more of the answer, and did not give it
 * @property {string} [finish]  why the answer ended
 * @property {string} [answerId]  the server's name of the answer
 * @property {boolean} [remembered]  whether the server can go on from it
 * @property {string} [model]  of several, the one that was asked
 * @property {string} [scope]  in which it was asked
 * @property {string} [why]  "again", "edit" or "answer": a branch
 * @property {string} [of]  the turn whose answer was edited
 * @property {string} [basis]  `basisOf` the chat when it was asked
 * @property {number} [changed]  when the reader changed it last
 * @property {boolean} [removed]  it is not seen, and no part of the chat
 * @property {string[]} [dropped]  the ids of documents that the reader has taken from it
 * @property {object} [report]  `slotcache` of the answer
 * @property {object} [timings]
 * @property {object} [progress]  of the prompt, while it is computed
 *
 * @typedef {{id: string, title: string, created: number, updated: number, system: string, head: string|null,
 *   turns: Turn[], searched?: import("./documents.js").Searched[], pinned?: boolean, changed?: Object<string, number>}} Chat
 *   searched: files for its next question. changed: when the reader has set a field of FIELDS
 */

import { brief } from "./dom.js";
import { askedModel } from "./models.js";

/** @param {string} system  the system prompt @returns {Chat} */
export function newChat(system) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, system, head: null, turns: [] };
}

/** @returns {string} an id that no chat and no turn has. Where the page is not served securely, `randomUUID` is missing. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Add a turn and make it the one that is seen.
 * @param {Chat} chat
 * @param {Pick<Turn, "parent"|"question"|"documents"|"searched"|"retrieval"> & Partial<Pick<Turn, "dropped"|"why">>} asked
 * @returns {Turn}
 */
export function addTurn(chat, asked) {
  const turn = { id: newId(), answer: "", thought: "", state: "running", ...asked };
  chat.turns.push(turn);
  chat.head = turn.id;
  chat.title ||= brief(turn.question, 60) || "Documents";
  chat.updated = Date.now();
  return turn;
}

/**
 * Add a turn that has an answer in the reader's own words, beside the one that it stands for.
 * @param {Chat} chat
 * @param {Turn} turn
 * @param {string} answer
 */
export function addAnswer(chat, turn, answer) {
  const { parent, question, documents, searched, retrieval, dropped, report } = turn;
  const found = report?.retrieved && { report: { retrieved: report.retrieved } };
  const of = turn.id;
  addTurn(chat, { parent, question, documents, searched, retrieval, dropped, ...found, answer, of, state: "done", why: "answer" });
}

const FIELDS = ["title", "pinned", "system"]; // of a chat that the reader sets; of two values the later one counts

/** Set fields of a chat. @param {Chat} chat @param {Partial<Pick<Chat, "title"|"pinned"|"system">>} fields */
export function setFields(chat, fields) {
  const changed = { ...chat.changed };
  for (const name of Object.keys(fields)) changed[name] = laterThan(changed[name]);
  Object.assign(chat, fields, { changed });
}

/** Change a turn that has ended. @param {Turn} turn @param {Partial<Turn>} fields */
export function changeTurn(turn, fields) {
  Object.assign(turn, fields, { changed: laterThan(turn.changed) });
}

/** The clock of the machine may go back; a change never does. */
function laterThan(before = 0) {
  return Math.max(Date.now(), before + 1);
}

/** @type {Set<string>} the turns whose answers this page reads: nobody knows more of them */
export const live = new Set();
const STATES = ["running", "stopped", "failed", "done"]; // the later one is known where more is known

/**
 * Take into a chat what the same chat has elsewhere: its turns, of turns in both the one that was changed last or of which
 * more is known, and the fields that were set last.
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
  for (const name of FIELDS) {
    const set = other.changed?.[name] ?? 0;
    if (set > (chat.changed?.[name] ?? 0)) Object.assign(chat, { [name]: other[name], changed: { ...chat.changed, [name]: set } });
  }
}

function isFurther(one, other) {
  const later = (one.changed ?? 0) - (other.changed ?? 0);
  if (later) return later > 0;
  const ahead = STATES.indexOf(one.state) - STATES.indexOf(other.state);
  return ahead > 0 || (ahead === 0 && one.answer.length > other.answer.length);
}

/**
 * Show what another page shows: turns behind the one that is seen last, or an answer that was edited there.
 * @param {Chat} chat  joined with the other
 * @param {Chat} other
 * @param {Set<string>} known  the turns that it had before
 */
export function follow(chat, { head }, known) {
  const seen = new Set(seenTurns(chat).map(({ id }) => id));
  const isNext = ({ id, of }) => id === chat.head || (seen.has(of) && !known.has(id));
  if (pathTo(chat, head).some(isNext)) chat.head = head;
}

/** @param {Chat} chat @param {string} head @returns {Turn[]} the turns up to one, first to last, removed ones included */
export function pathTo(chat, head) {
  const byId = new Map(chat.turns.map((turn) => [turn.id, turn]));
  const path = [];
  for (let turn = byId.get(head); turn; turn = byId.get(turn.parent)) path.unshift(turn);
  return path;
}

/** @param {Chat} chat @returns {Turn[]} the turns that are seen, first to last */
export function seenTurns(chat) {
  return pathTo(chat, chat.head).filter(({ removed }) => !removed);
}

/** @param {Chat} chat @param {Turn} turn @returns {Turn[]} the turns in the same place, itself included */
export function siblings(chat, turn) {
  return turnsBehind(chat, turnsBefore(chat, turn).at(-1));
}

/** @param {Chat} chat @param {Turn|undefined} turn  none: the first ones @returns {Turn[]} the turns right behind one */
export function turnsBehind(chat, turn) {
  const byId = new Map(chat.turns.map((one) => [one.id, one]));
  const seen = ({ parent }) => {
    let before = byId.get(parent);
    while (before?.removed) before = byId.get(before.parent);
    return before;
  };
  return chat.turns.filter((one) => !one.removed && seen(one) === turn);
}

/** Show another branch, down to its newest turn. @param {Chat} chat @param {Turn} turn */
export function switchTo(chat, turn) {
  let last = turn;
  for (let next = last; next; next = turnsBehind(chat, last).at(-1)) last = next;
  chat.head = last.id;
}

/**
 * Return what the reader has changed in what a turn's answer stands on, in a text to compare.
 * @param {Chat} chat
 * @param {Turn} turn
 */
export function basisOf(chat, turn) {
  const changes = pathTo(chat, turn.id).map(({ id, removed, dropped }) => (removed ? REMOVED + id : dropped?.length && [id, ...dropped]));
  return [chat.changed?.system, ...changes].filter(Boolean).join(" ");
}

const REMOVED = "-"; // in front of an id

/** @param {Chat} chat @param {Turn} turn @returns {Turn[]} the turns of its prompt, also those that were removed later */
export function promptTurns(chat, turn) {
  const left = new Set((turn.basis ?? "").split(" "));
  return pathTo(chat, turn.id).filter(({ id }) => !left.has(REMOVED + id));
}

/** @param {Chat} chat @param {Turn} turn @returns {Turn[]} the turns before it, first to last */
export function turnsBefore(chat, turn) {
  return seenTurns({ ...chat, head: turn.parent });
}

/**
 * Return the turns before one that a request has to hold: those behind the last one that the server remembers as it is here.
 *
 * A turn that failed is never sent again.
 * @param {Chat} chat
 * @param {Turn} turn
 * @param {boolean} [isWhole]  the server remembers none
 * @returns {{known: Turn|undefined, unknown: Turn[]}}
 */
export function turnsToSend(chat, turn, isWhole = false) {
  const before = turnsBefore(chat, turn);
  const asked = askedModel();
  const isKnown = (one) => one.remembered && (one.model ?? "") === asked && (one.basis ?? "") === basisOf(chat, one);
  const last = isWhole ? -1 : before.findLastIndex(isKnown);
  return { known: before[last], unknown: before.slice(last + 1).filter(({ state }) => state !== "failed") };
}

/**
 * Return the fields of a request that say what is asked.
 * @param {Chat} chat
 * @param {Turn} turn
 * @param {Map<string, Document>} [found]  the documents of the searches of the turns to send, by their ids
 * @param {boolean} [isWhole]  the server remembers nothing of this chat
 */
export function questionFields(chat, turn, found = new Map(), isWhole = false) {
  const { known, unknown } = turnsToSend(chat, turn, isWhole);
  const since = unknown.flatMap((earlier) => [questionOf(earlier, found), answerOf(earlier)]);
  const retrieval = retrievalOf(turn);
  if (known) return { messages: [...since, questionOf(turn)], previous_response_id: known.answerId, ...retrieval };
  const system = chat.system ? [{ role: "system", content: chat.system }] : [];
  return { messages: [...system, ...since, questionOf(turn)], conversation: { id: chat.id, history: "whole" }, ...retrieval };
}

/** The fields of a request that goes on with an answer that was cut. @param {Turn} turn @param {object} fields */
export function continuing(turn, { messages, ...fields }) {
  const where = turn.answer ? true : "reasoning_content";
  return { ...fields, messages: [...messages, answerOf(turn)], continue_final_message: where, echo: true };
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

/** @param {Turn[]} turns @returns {{id: string, title: string, text?: string}[]} all that was found for them; of a file with its text */
export function foundIn(turns) {
  return turns.flatMap(({ report }) => report?.retrieved ?? []);
}

/** A message that comes without documents would keep those that the server has. */
function questionOf(turn, found = new Map()) {
  const searched = foundIn([turn]).flatMap(({ id }) => found.get(id) ?? []);
  const documents = [...turn.documents, ...searched];
  return { role: "user", content: turn.question, ...((documents.length || turn.dropped?.length) && { documents }) };
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
