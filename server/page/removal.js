/** Turns and documents that the reader takes from a chat: for good once they can no longer be taken back. */

import { forgetAnswers } from "./asking.js";
import { changeTurn, pathTo } from "./chat.js";
import { brief } from "./dom.js";
import { offerBack } from "./undo.js";

const EMPTY = { question: "", answer: "", thought: "", documents: [], searched: undefined, report: undefined, error: undefined };

/**
 * Remove a turn. What stands behind it moves up.
 * @param {import("./chat.js").Chat} chat
 * @param {import("./chat.js").Turn} turn
 * @param {(isGoing?: boolean) => void} keep  called after each change. isGoing: the page goes
 */
export function removeTurn(chat, turn, keep) {
  const answered = [turn, ...answeredBehind(chat, turn)];
  const told = `“${brief(turn.question, 40)}” is removed.`;
  changeTurn(turn, { removed: true });
  keep();
  const back = () => {
    changeTurn(turn, { removed: false });
    keep();
  };
  offerBack(told, back, (isGoing) => {
    forgetAnswers(answered, isGoing);
    changeTurn(turn, EMPTY);
    keep(isGoing);
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
  const answered = [turn, ...answeredBehind(chat, turn)];
  changeTurn(turn, { documents: documents.filter(({ id }) => id !== document.id), dropped: [...dropped, document.id] });
  keep();
  const back = () => {
    changeTurn(turn, { documents, dropped });
    keep();
  };
  offerBack(`“${brief(document.title || document.id, 40)}” is removed from the chat.`, back, (isGoing) => forgetAnswers(answered, isGoing));
}

/** The answers so far that were made behind a turn: the server has it in each of their histories. */
function answeredBehind(chat, turn) {
  return chat.turns.filter((one) => one !== turn && one.remembered && pathTo(chat, one.id).includes(turn));
}
