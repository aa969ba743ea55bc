/** Answers that the server finishes without their page: fetched, piece by piece and then as a whole. */

import { ApiError, get } from "./api.js";
import { scopeQuery } from "./settings.js";

const EVERY = 1000; // ms between two looks
const TRIES = 7; // looks that may fail in turn, each after twice the time: about a minute
const WANTS_KEY = 401;

/**
 * Look at an answer until the server has the whole of it. Where it cannot tell, look less often, and then no more.
 * @param {import("./chat.js").Turn} turn
 * @param {{view: import("./asking.js").View|null}} one
 * @param {AbortSignal} signal
 * @throws {ApiError} with `mayCome` where the server may have it
 */
export async function fetchAnswer(turn, one, signal) {
  for (let failed = 0; ; ) {
    const found = await get(addressOf(turn), { signal }).catch((error) => {
      if (error.name === "AbortError") throw error;
      if (error.status === 404) throw new ApiError(404, { message: LOST });
      failed += 1;
      const message = error instanceof ApiError ? error.message : "The server cannot be reached.";
      if (error.status === WANTS_KEY || failed === TRIES) throw mayCome(error.status, message);
      return { status: message };
    });
    if (!found.status) return takeWhole(found, turn, one.view);
    if (found.choices) {
      failed = 0;
      takeMore(found.choices[0].message.content, turn, one.view);
    }
    one.view?.wait(found.status === "in_progress" ? "The server finishes this answer" : found.status);
    await new Promise((resolve) => setTimeout(resolve, EVERY * 2 ** Math.max(failed - 1, 0)));
    signal.throwIfAborted();
  }
}

const LOST = "The server has no more of this answer: it was stopped, or the server was. Answer again asks anew.";

function mayCome(status = 0, why) {
  const message = `The server may have this answer, and does not give it: ${why}`;
  return Object.assign(new ApiError(status, { message }), { mayCome: true });
}

/** @param {import("./chat.js").Turn} turn @returns {string} the route of its answer */
export function addressOf({ answerId, scope, model }) {
  return `v1/chat/completions/${answerId}${scopeQuery({ scope, model })}`;
}

function takeMore(content, turn, view) {
  if (!content.startsWith(turn.answer)) return;
  const piece = content.slice(turn.answer.length);
  turn.answer = content;
  if (piece) view?.text(piece);
}

function takeWhole({ choices: [{ message, finish_reason: finish }], slotcache: report, timings }, turn, view) {
  Object.assign(turn, { answer: message.content ?? "", thought: message.reasoning_content ?? "", report, timings, finish });
  turn.remembered = report.conversation?.remembered ?? false;
  view?.whole();
}
