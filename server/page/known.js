/**
 * The texts behind cached runs. The server lists runs without their text; a browser finds its own by the ids that came
 * with its answers, and knows nothing of the others.
 */

import { documentOf, promptTurns } from "./chat.js";
import { brief } from "./dom.js";
import { kindOf, nameOf } from "./names.js";
import { nameOf as nameOfSource, place } from "./sources.js";
import { loadChat } from "./store.js";

const MESSAGE = /^message \d+ \((\w+)\)/;

/**
 * Return the rows that a finished turn adds to the store.
 * @param {import("./chat.js").Chat} chat
 * @param {import("./chat.js").Turn} turn
 * @returns {{id: string, chat: string, title: string, turn: string, kind: string, part: string, name: string,
 *   isLast: boolean}[]} isLast: the answer stands behind it
 */
export function segmentRows(chat, turn) {
  const turns = promptTurns(chat, turn);
  const titles = new Map(turns.flatMap((one) => [...one.documents, ...(one.report?.retrieved ?? [])]).map((one) => [one.id, nameOfSource(one)]));
  const counts = { user: 0, assistant: 0 };
  const segments = turn.report?.segments ?? [];
  return segments.map(({ id, label }, at) => {
    const [, role] = MESSAGE.exec(label) ?? [];
    const number = role in counts ? counts[role]++ : counts.user;
    const one = turns[number] ?? turn;
    const kind = kindOf(label);
    const text = { question: one.question, answer: one.answer }[kind];
    const name = text ? `${nameOf(label)}: ${brief(text, 60)}` : nameOf(label, (document) => titles.get(document));
    const part = kind === "document" ? label.slice("document ".length) : kind;
    return { id, chat: chat.id, title: chat.title, turn: one.id, kind, part, name, isLast: at === segments.length - 1 };
  });
}

/**
 * Return the text that a row stands for, from this browser's own chats and the server's folder.
 * @param {{chat: string, turn: string, kind: string, part: string}} row
 * @returns {Promise<string>}
 */
export async function textOf(row) {
  const chat = await loadChat(row.chat);
  const turn = chat?.turns.find(({ id }) => id === row.turn);
  if (!turn) return "";
  if (row.kind === "document") return textOfDocument(chat, turn, row.part);
  return { system: chat.system, question: turn.question, answer: turn.answer }[row.kind] ?? "";
}

/** A document that was found in the folder is asked for: its file may be gone by now. */
async function textOfDocument(chat, turn, id) {
  const document = documentOf(chat, turn, id);
  if (!document) return "";
  return document.text ?? place(id).then(({ text }) => text).catch(() => "");
}
