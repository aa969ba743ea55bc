/** Turns and documents that the reader takes from a chat: for good once they can no longer be taken back. */

import { forgetAnswers, isRunning } from "./asking.js";
import { changeTurn, pathTo, seenTurns, siblings, switchTo } from "./chat.js";
import { brief } from "./dom.js";
import { saveChat } from "./store.js";
import { offerBack } from "./undo.js";

const EMPTY = { question: "", answer: "", thought: "", documents: [], searched: undefined, report: undefined, error: undefined };

/**
 * Remove a turn. What stands behind it moves up; behind the last one stands nothing, and another version of it is seen.
 * @param {import("./chat.js").Chat} chat
 * @param {import("./chat.js").Turn} turn
 * @param {() => void} keep  called after each change that is seen
 */
export function removeTurn(chat, turn, keep) {
  const answered = [turn, ...answeredBehind(chat, turn)];
  const told = `“${brief(turn.question, 40)}” is removed.`;
  const isLast = seenTurns(chat).at(-1) === turn;
  const before = chat.head;
  changeTurn(turn, { removed: true });
  const version = siblings(chat, turn).at(-1);
  if (isLast && version) switchTo(chat, version);
  const after = chat.head;
  keep();
  const back = () => {
    changeTurn(turn, { removed: false });
    if (chat.head === after) chat.head = before;
    keep();
  };
  offerBack(told, back, (isGoing) => {
    forgetEnded(answered, isGoing);
    changeTurn(turn, EMPTY);
    saveChat(chat, { isGoing });
  });
}

/**
 * Take a document from a turn.
 * @param {import("./chat.js").Chat} chat
 * @param {import("./chat.js").Turn} turn
 * @param {import("./chat.js").Document} document
 * @param {() => void} keep  called after each change
 */
export function removeDocument(chat, turn, document, keep) {
  const { documents, dropped = [] } = turn;
  const at = documents.findIndex(({ id }) => id === document.id);
  const answered = [turn, ...answeredBehind(chat, turn)];
  changeTurn(turn, { documents: documents.filter(({ id }) => id !== document.id), dropped: [...dropped, document.id] });
  keep();
  const back = () => {
    const left = turn.dropped.filter((id) => id !== document.id); // others may have been removed meanwhile
    changeTurn(turn, { documents: turn.documents.toSpliced(at, 0, document), dropped: left });
    keep();
  };
  offerBack(`“${brief(document.title || document.id, 40)}” is removed from the chat.`, back, (isGoing) => forgetEnded(answered, isGoing));
}

/** An answer that still comes would be stopped. */
function forgetEnded(turns, isGoing) {
  forgetAnswers(turns.filter(({ id }) => !isRunning(id)), isGoing);
}

/** The turns so far that were asked behind a turn, those whose answers come included: the server has it in each of their histories. */
function answeredBehind(chat, turn) {
  return chat.turns.filter((one) => one !== turn && pathTo(chat, one.id).includes(turn));
}
