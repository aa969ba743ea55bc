/** The search in all chats: by words of their titles, questions and answers. */

import { eachChat, listChats } from "./store.js";

const BEFORE = 24; // characters of an excerpt in front of what was found
const EXCERPT = 90; // characters

/**
 * @typedef {import("./store.js").Head & {excerpt?: [string, string, string]}} Found
 *   excerpt: of a text that has the first word, in front of it, the word, and behind it
 */

/** Texts of chats as they are searched, kept from one search to the next. */
export class ChatSearch {
  constructor() {
    /** @type {Map<string, {text: string, folded: string}>} by chat */
    this._texts = new Map();
  }

  /** Read a chat anew with the next search: it has changed. @param {string} id */
  forget(id) {
    this._texts.delete(id);
  }

  /** Read all chats that were not read yet. */
  async read() {
    const unread = (await listChats()).map(({ id }) => id).filter((id) => !this._texts.has(id));
    await eachChat(unread, (chat) => this._texts.set(chat.id, textOf(chat)));
  }

  /**
   * @param {string} query
   * @returns {Promise<Found[]>} the chats that have all words of it, also as parts of words; in the order of the list
   */
  async find(query) {
    const words = folded(query).split(/\s+/).filter(Boolean);
    await this.read();
    return (await listChats()).flatMap((head) => {
      const title = folded(head.title);
      const { text, folded: own } = this._texts.get(head.id) ?? { text: "", folded: "" };
      if (!words.every((word) => title.includes(word) || own.includes(word))) return [];
      return [{ ...head, excerpt: title.includes(words[0]) ? undefined : excerptOf(text, own, words[0]) }];
    });
  }
}

function textOf({ turns }) {
  const text = turns.filter(({ removed }) => !removed).flatMap(({ question, answer }) => [question, answer]).join("\n");
  return { text, folded: folded(text) };
}

/** Small letters without marks, as many as the text has: a place in the folded text is one in the text. */
function folded(text) {
  return text.replace(/[A-Z]+|[^\x00-\x7f]/gu, (some) => (some < "\x7f" ? some.toLowerCase() : letter(some)));
}

const letters = new Map();

function letter(one) {
  if (!letters.has(one)) {
    const plain = one.normalize("NFKD").replace(/\p{M}+/gu, "").toLowerCase();
    letters.set(one, plain.length === one.length ? plain : one);
  }
  return letters.get(one);
}

function excerptOf(text, own, word) {
  const at = own.indexOf(word);
  if (at < 0) return undefined;
  const from = Math.max(at - BEFORE, 0);
  const end = at + word.length;
  return [`${from ? "…" : ""}${text.slice(from, at)}`, text.slice(at, end), text.slice(end, from + EXCERPT)];
}
