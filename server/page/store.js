/**
 * Chats kept in this browser (IndexedDB), or for as long as the page is open where the browser keeps nothing.
 *
 * heads: the list of chats. chats: each as a whole. segments: the parts of prompts that this browser has sent, by the ids
 * under which the server lists its cached runs.
 */

const STORES = { heads: "id", chats: "id", segments: ["id", "chat"] };
const memory = { heads: new Map(), chats: new Map(), segments: new Map() };

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

/** @returns {Promise<{id: string, title: string, updated: number}[]>} the chats, the newest first */
export async function listChats() {
  const heads = (await run(["heads"], "readonly", (store) => store("heads").getAll())) ?? [...memory.heads.values()];
  return heads.sort((one, other) => other.updated - one.updated);
}

/** @param {string} id @returns {Promise<import("./chat.js").Chat|undefined>} */
export async function loadChat(id) {
  return (await run(["chats"], "readonly", (store) => store("chats").get(id))) ?? memory.chats.get(keyOf("chats", { id }));
}

/** @param {import("./chat.js").Chat} chat */
export async function saveChat(chat) {
  const { id, title, updated } = chat;
  await put({ heads: [{ id, title, updated }], chats: [chat] });
}

/** @param {string} id */
export async function deleteChat(id) {
  memory.heads.delete(keyOf("heads", { id }));
  memory.chats.delete(keyOf("chats", { id }));
  await run(["heads", "chats", "segments"], "readwrite", (store) => {
    store("heads").delete(id);
    store("chats").delete(id);
    const cursor = store("segments").openCursor();
    cursor.onsuccess = () => {
      if (!cursor.result) return;
      if (cursor.result.value.chat === id) cursor.result.delete();
      cursor.result.continue();
    };
  });
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
    return { result: true };
  });
  if (done) return;
  for (const name of names) for (const row of rows[name]) memory[name].set(keyOf(name, row), structuredClone(row));
}
