/** Chats as files: JSON for one or all of them, which can be brought back, and Markdown to read. */

import { newId, seenTurns } from "./chat.js";
import { brief } from "./dom.js";
import { nameOf, placeText } from "./sources.js";
import { addChats, eachChat, listChats } from "./store.js";

const FORMAT = "slotcache.chats";
const VERSION = 1;
const MOST_BYTES = 256 << 20; // of a file that is read: it is in memory several times
const MOST_OF_TITLE = 200; // characters
const OWN_ID = /^[\w-]{1,64}$/;
const STATES = ["done", "stopped", "failed"];

/** A file that is no export of chats, or a damaged one; `message` says why. */
export class ImportError extends Error {}

/** @param {import("./chat.js").Chat[]} chats @returns {Blob} a file that `importChats` reads */
export function toJson(chats) {
  const shown = chats.map(withoutRemoved);
  const file = { format: FORMAT, version: VERSION, exported: new Date().toISOString(), chats: shown };
  return new Blob([JSON.stringify(file, null, 1)], { type: "application/json" });
}

function withoutRemoved(chat) {
  const byId = new Map(chat.turns.map((turn) => [turn.id, turn]));
  const left = (id) => {
    let turn = byId.get(id);
    while (turn?.removed) turn = byId.get(turn.parent);
    return turn?.id ?? null;
  };
  const turns = chat.turns.filter(({ removed }) => !removed).map((turn) => ({ ...turn, parent: left(turn.parent) }));
  return { ...chat, head: left(chat.head), turns };
}

/** @param {import("./chat.js").Chat} chat @returns {Blob} the turns that are seen, as Markdown */
export function toMarkdown(chat) {
  const turns = seenTurns(chat).map(({ question, answer, documents, report }) => {
    const names = [...documents.map(nameOf), ...(report?.retrieved ?? []).map((one) => [nameOf(one), one.path && placeText(one)].filter(Boolean).join(", "))];
    const sources = names.length ? ["Documents:", names.map((name) => `- ${name}`).join("\n")] : [];
    return [`## ${question.replace(/\s*\n\s*/g, " ")}`, answer, ...sources].join("\n\n");
  });
  const system = chat.system ? [`> ${chat.system.replaceAll("\n", "\n> ")}`] : [];
  return new Blob([[`# ${chat.title}`, ...system, ...turns].join("\n\n"), "\n"], { type: "text/markdown" });
}

/** @returns {Promise<Blob>} all chats of this browser */
export async function allChats() {
  const chats = [];
  await eachChat((await listChats()).map(({ id }) => id), (chat) => chats.push(chat));
  return toJson(chats);
}

/** Hand a file to the reader. @param {Blob} blob @param {string} name */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the browser reads it meanwhile
}

/** @param {string} title @returns {string} a name for a file */
export function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
}

/**
 * Bring chats of a file into this browser: all of them, or none. One whose id is taken, or no id of this page, gets another one.
 * @param {File} file
 * @returns {Promise<import("./chat.js").Chat[]>} the chats that were added
 * @throws {ImportError}
 */
export async function importChats(file) {
  if (file.size > MOST_BYTES) throw new ImportError(`“${file.name}” is larger than ${MOST_BYTES >> 20} MiB.`);
  const chats = read(await file.text(), file.name);
  const taken = new Set((await listChats()).map(({ id }) => id));
  const added = chats.map((chat) => {
    const one = taken.has(chat.id) || !hasOwnIds(chat) ? renamed(chat) : chat;
    taken.add(one.id);
    return one;
  });
  await addChats(added);
  return added;
}

/** Ids stand in addresses, also of the server, and in selectors. */
function hasOwnIds({ id, turns }) {
  return [id, ...turns.map((turn) => turn.id)].every((one) => OWN_ID.test(one));
}

/** A chat beside the one that it is a copy of: none of its ids is that one's. */
function renamed(chat) {
  const ids = new Map(chat.turns.map(({ id }) => [id, newId()]));
  const turns = chat.turns.map((turn) => ({ ...turn, id: ids.get(turn.id), parent: ids.get(turn.parent) ?? null }));
  return { ...chat, id: newId(), head: ids.get(chat.head) ?? null, turns };
}

function read(text, name) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new ImportError(`“${name}” is no export of chats: it is no JSON, or its end is missing.`);
  }
  if (file?.format !== FORMAT) throw new ImportError(`“${name}” is no export of chats: it has no "format": "${FORMAT}".`);
  if (file.version !== VERSION) throw new ImportError(`“${name}” has the version ${JSON.stringify(file.version)}, and this page reads version ${VERSION}.`);
  try {
    return list(file.chats, "chats", chatOf);
  } catch (error) {
    if (error instanceof ImportError) throw new ImportError(`“${name}” is damaged: ${error.message}. Nothing was imported.`);
    throw error;
  }
}

// ---- What a chat of a file has to be. Fields that are not named here are left out. --------------------------------------

function chatOf(value, where) {
  const { id, title, created, updated, system, head, turns, pinned } = fields(value, where);
  const chat = {
    id: text(id, `${where}.id`),
    title: brief(text(title, `${where}.title`), MOST_OF_TITLE) || "Chat",
    created: number(created, `${where}.created`),
    updated: number(updated, `${where}.updated`),
    system: text(system ?? "", `${where}.system`),
    head: head === null ? null : text(head, `${where}.head`),
    turns: list(turns, `${where}.turns`, turnOf),
    ...(pinned === true && { pinned }),
  };
  const seen = new Set();
  chat.turns.forEach((turn, at) => {
    if (seen.has(turn.id)) fail(`${where}.turns[${at}].id`, "an id that no other turn has");
    if (turn.parent !== null && !seen.has(turn.parent)) fail(`${where}.turns[${at}].parent`, "the id of an earlier turn, or null");
    seen.add(turn.id);
  });
  if (chat.head !== null && !seen.has(chat.head)) chat.head = chat.turns.at(-1)?.id ?? null;
  return chat;
}

/** A turn as it is read. What ties it to a server is left out: the next question is sent with the whole chat. */
function turnOf(value, where) {
  const { id, parent, question, answer, thought, documents, retrieval, state, error, finish, why, report, dropped } = fields(value, where);
  return {
    id: text(id, `${where}.id`),
    parent: parent === null ? null : text(parent, `${where}.parent`),
    question: text(question, `${where}.question`),
    answer: text(answer, `${where}.answer`),
    thought: text(thought ?? "", `${where}.thought`),
    documents: list(documents, `${where}.documents`, documentOf),
    retrieval: retrieval === true,
    state: STATES.includes(state) ? state : "stopped",
    ...(typeof error === "string" && { error }),
    ...(finish === "length" ? { finish } : { finish: "stop" }),
    ...(why === "answer" && { why }),
    ...(dropped?.length && { dropped: list(dropped, `${where}.dropped`, text) }),
    ...(report?.retrieved && { report: reportOf(report, `${where}.report`) }),
  };
}

function documentOf(value, where) {
  const { id, title, text: own } = fields(value, where);
  return { id: text(id, `${where}.id`), ...(title && { title: text(title, `${where}.title`) }), text: text(own, `${where}.text`) };
}

/** The sources of an answer; what the server's cache had of its prompt is left out. */
function reportOf({ retrieved, citations }, where) {
  return {
    retrieved: list(retrieved, `${where}.retrieved`, sourceOf),
    ...(citations && { citations: list(citations, `${where}.citations`, citationOf) }),
  };
}

function sourceOf(value, where) {
  const { id, title, path, page } = fields(value, where);
  const named = Object.entries({ title, path }).filter(([, one]) => typeof one === "string");
  return { id: text(id, `${where}.id`), ...Object.fromEntries(named), ...(typeof page === "number" && { page }) };
}

function citationOf(value, where) {
  const { id, start, stop, quote } = fields(value, where);
  const [from, to] = [number(start, `${where}.start`), number(stop, `${where}.stop`)];
  return { id: text(id, `${where}.id`), start: Math.trunc(from), stop: Math.trunc(to), ...(quote === true && { quote }) };
}

function fields(value, where) {
  return value !== null && typeof value === "object" && !Array.isArray(value) ? value : fail(where, "an object");
}

function text(value, where) {
  return typeof value === "string" ? value : fail(where, "a text");
}

function number(value, where) {
  return Number.isFinite(value) && value >= 0 ? value : fail(where, "a number");
}

function list(value, where, read) {
  return Array.isArray(value) ? value.map((one, at) => read(one, `${where}[${at}]`)) : fail(where, "a list");
}

function fail(where, expected) {
  throw new ImportError(`${where} is not ${expected}`);
}
