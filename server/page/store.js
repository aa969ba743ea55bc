/**
 * Chats kept in this browser (IndexedDB), or for as long as the page is open where the browser keeps nothing.
 *
 * heads: the list of chats. chats: each as a whole. segments: the parts of prompts that this browser has sent, by the ids
 * under which the server lists its cached runs.
 */

import { join } from "./chat.js";

const AT_ONCE = 20; // chats
const STORES = { heads: "id", chats: "id", segments: ["id", "chat"] };
const memory = { heads: new Map(), chats: new Map(), segments: new Map() };

const others = new BroadcastChannel("slotcache"); // the other pages of this browser
const gone = new Set(); // chats that were deleted, here or there

/** Set what is called when another page has changed a chat. @param {(id: string, isGone: boolean) => void} listener */
export function onChange(listener) {
  others.onmessage = ({ data: { id, isGone } }) => {
    if (isGone) gone.add(id);
    else gone.delete(id);
    listener(id, isGone);
  };
}

let opened;

function open() {
  opened ??= new Promise((resolve) => {
    const request = indexedDB.open("slotcache", 1);
    request.onupgradeneeded = () => {
      for (const [name, keyPath] of Object.entries(STORES)) request.result.createObjectStore(name, { keyPath });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  });
  return opened;
}

async function run(names, mode, act) {
  const base = await open();
  if (!base) return null;
  return new Promise((resolve, reject) => {
    const transaction = base.transaction(names, mode);
    const request = act((name) => transaction.objectStore(name));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error);
  });
}

const keyOf = (name, row) => JSON.stringify([STORES[name]].flat().map((part) => row[part]));

/**
 * @typedef {{id: string, title: string, updated: number, pinned?: boolean}} Head
 *
 * @returns {Promise<Head[]>} the chats, the pinned ones first, and the newest of each first
 */
export async function listChats() {
  const heads = (await run(["heads"], "readonly", (store) => store("heads").getAll())) ?? [...memory.heads.values()];
  return heads.sort((one, other) => Boolean(other.pinned) - Boolean(one.pinned) || other.updated - one.updated);
}

/** @param {string} id @returns {Promise<import("./chat.js").Chat|undefined>} */
export async function loadChat(id) {
  return (await run(["chats"], "readonly", (store) => store("chats").get(id))) ?? memory.chats.get(keyOf("chats", { id }));
}

/**
 * Read chats, a few at a time: the page stays responsive, and holds no more of them at once.
 * @param {string[]} ids
 * @param {(chat: import("./chat.js").Chat) => void} visit
 */
export async function eachChat(ids, visit) {
  for (let at = 0; at < ids.length; at += AT_ONCE) {
    for (const chat of await Promise.all(ids.slice(at, at + AT_ONCE).map(loadChat))) if (chat) visit(chat);
  }
}

/**
 * Keep chats that this browser has not, all of them or none.
 * @param {import("./chat.js").Chat[]} chats  whose ids are new
 */
export async function addChats(chats) {
  for (const { id } of chats) gone.delete(id);
  await put({ heads: chats.map(headOf), chats });
  for (const { id } of chats) others.postMessage({ id, isGone: false });
}

/**
 * Save a chat, joined with what another page has saved of it. One that was deleted is not saved again.
 * @param {import("./chat.js").Chat} chat
 * @param {{isPart?: boolean, isGoing?: boolean}} [options]  isPart: of an answer that still comes; other pages need not look.
 *   isGoing: the page goes, and no time is left to look at what is kept
 */
export async function saveChat(chat, { isPart = false, isGoing = false } = {}) {
  if (gone.has(chat.id)) return;
  if (isGoing) return put({ heads: [headOf(chat)], chats: [chat] });
  const done = await run(["heads", "chats"], "readwrite", (store) => {
    const stored = store("chats").get(chat.id);
    stored.onsuccess = () => {
      if (stored.result) join(chat, stored.result);
      store("heads").put(headOf(chat));
      store("chats").put(chat);
    };
    return { result: true };
  });
  if (!done) keep({ heads: [headOf(chat)], chats: [chat] });
  if (!isPart) others.postMessage({ id: chat.id, isGone: false });
}

const headOf = ({ id, title, updated, pinned }) => ({ id, title, updated, ...(pinned && { pinned }) });

/**
 * Delete a chat.
 * @param {string} id
 * @returns {Promise<{chat: import("./chat.js").Chat|undefined, segments: object[]}>} what `restoreChat` brings back
 */
export async function deleteChat(id) {
  gone.add(id);
  const chat = await loadChat(id);
  const segments = [];
  memory.heads.delete(keyOf("heads", { id }));
  memory.chats.delete(keyOf("chats", { id }));
  await run(["heads", "chats", "segments"], "readwrite", (store) => {
    store("heads").delete(id);
    store("chats").delete(id);
    const cursor = store("segments").openCursor();
    cursor.onsuccess = () => {
      if (!cursor.result) return;
      if (cursor.result.value.chat === id) {
        segments.push(cursor.result.value);
        cursor.result.delete();
      }
      cursor.result.continue();
    };
  });
  others.postMessage({ id, isGone: true });
  return { chat, segments };
}

/** Bring back a chat that was deleted. @param {Awaited<ReturnType<typeof deleteChat>>} deleted */
export async function restoreChat({ chat, segments }) {
  if (!chat) return;
  gone.delete(chat.id);
  await put({ heads: [headOf(chat)], chats: [chat], segments });
  others.postMessage({ id: chat.id, isGone: false });
}

/** @param {object[]} segments  rows of `known.js` */
export async function saveSegments(segments) {
  await put({ segments });
}

/** @returns {Promise<object[]>} */
export async function loadSegments() {
  return (await run(["segments"], "readonly", (store) => store("segments").getAll())) ?? [...memory.segments.values()];
}

async function put(rows) {
  const names = Object.keys(rows);
  const done = await run(names, "readwrite", (store) => {
    for (const name of names) for (const row of rows[name]) store(name).put(row);
    store(names[0]).transaction.commit(); // also where the page goes
    return { result: true };
  });
  if (!done) keep(rows);
}

function keep(rows) {
  for (const [name, some] of Object.entries(rows)) for (const row of some) memory[name].set(keyOf(name, row), structuredClone(row));
}
