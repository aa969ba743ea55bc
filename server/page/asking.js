/** Questions on their way: one request each, its stream read into its turn, and ended by the reader or the server. */

import { ApiError, call, stream } from "./api.js";
import { basisOf, changeTurn, continuing, foundIn, join, live, questionFields, turnsToSend } from "./chat.js";
import { figure } from "./dom.js";
import { addressOf, fetchAnswer } from "./fetching.js";
import { segmentRows } from "./known.js";
import { askedModel, modelField, modelNames } from "./models.js";
import { requestFields, scopeField, scopeQuery, settings } from "./settings.js";
import { place } from "./sources.js";
import { loadChat, saveChat, saveSegments } from "./store.js";

/**
 * @typedef {object} View  what shows a turn while its answer comes
 * @property {() => void} progress
 * @property {(text: string) => void} text
 * @property {(text: string) => void} thought
 * @property {(why: string) => void} wait  for a whole answer
 * @property {() => void} whole  the answer has come at once
 * @property {() => void} end
 */

const EVERY = 1000; // ms between two times that an answer is saved

/**
 * @typedef {{chat: import("./chat.js").Chat, stop: () => void, view: View|null, goesOn: boolean, skip: number, skipThought: number}} Running
 *   goesOn: with an answer that was cut. skip, skipThought: characters of the stream that the turn has
 */

/** @type {Map<string, Running>} by turn */
const running = new Map();
let noteChange = () => {};

addEventListener("pagehide", () => {
  for (const { chat } of running.values()) saveChat(chat, { isPart: true });
});

/** @param {string} turn @returns {boolean} */
export function isRunning(turn) {
  return running.has(turn);
}

/** @returns {Set<string>} the chats with an answer on its way, by id */
export function answeringChats() {
  return new Set([...running.values()].map(({ chat }) => chat.id));
}

/** Call a function when an answer begins or ends. @param {() => void} listener */
export function onAnswering(listener) {
  noteChange = listener;
}

/** Let a view show the turn from now on. @param {string} turn @param {View} view */
export function attach(turn, view) {
  const one = running.get(turn);
  if (one) one.view = view;
}

/** End an answer where it is. @param {string} turn */
export function stop(turn) {
  running.get(turn)?.stop();
}

/**
 * Ask the question of a turn, and keep the chat while the answer comes, and when it has ended.
 * @param {import("./chat.js").Chat} chat
 * @param {import("./chat.js").Turn} turn
 * @returns {Promise<void>}
 */
export async function ask(chat, turn) {
  Object.assign(turn, { model: askedModel(), scope: settings().scope, basis: basisOf(chat, turn) });
  await run(chat, turn, (one, signal) => readAll(chat, turn, one, signal));
}

/**
 * Go on with an answer that has reached its limit. Where nothing more comes, it is as before.
 * @param {import("./chat.js").Chat} chat
 * @param {import("./chat.js").Turn} turn
 * @returns {Promise<void>}
 */
export async function goOn(chat, turn) {
  const before = { ...turn };
  Object.assign(turn, { state: "running", model: askedModel(), scope: settings().scope, basis: basisOf(chat, turn) });
  await run(chat, turn, (one, signal) => readAll(chat, turn, Object.assign(one, { goesOn: true }), signal), () => {
    const { state, error, changed, answer, thought } = turn;
    if (state === "done") return;
    if (answer === before.answer && thought === before.thought) Object.assign(turn, before, { error, changed });
    else turn.state = "stopped";
  });
}

async function readAll(chat, turn, one, signal) {
  await saveChat(chat);
  await readAnswer(chat, turn, one, signal).catch((error) => fetchLost(error, turn, one, signal));
  if (!turn.finish && turn.answerId) await fetchAnswer(turn, one, signal);
}

/**
 * Fetch an answer that the server finishes: the page that has asked for it is gone, or another one.
 * @param {import("./chat.js").Chat} chat
 * @param {import("./chat.js").Turn} turn  with `answerId`
 * @returns {Promise<void>}
 */
export async function resume(chat, turn) {
  turn.state = "running";
  await run(chat, turn, (one, signal) => fetchAnswer(turn, one, signal));
}

/**
 * Ask a question again whose page went before the server began to answer. Another page that waits for it goes first.
 * @param {import("./chat.js").Chat} chat
 * @param {import("./chat.js").Turn} turn  without `answerId`
 * @param {() => void} changed  called once it is asked, or no more
 */
export async function askLost(chat, turn, changed) {
  if (navigator.locks) {
    await navigator.locks.request(lockOf(turn), () => {});
    const stored = await loadChat(chat.id);
    if (!stored) return; // it was deleted meanwhile
    join(chat, stored);
  } else {
    Object.assign(turn, { state: "failed", error: LOST }); // not served securely: nothing tells whether another page waits
  }
  if (turn.state === "running" && !isRunning(turn.id)) (turn.answerId ? resume : ask)(chat, turn);
  changed();
}

const LOST = "The page went before an answer came. Answer again asks anew.";
const lockOf = ({ id }) => `slotcache turn ${id}`;

async function run(chat, turn, read, ended = () => {}) {
  Object.assign(turn, { error: undefined, isTooLong: undefined, mayCome: undefined });
  const controller = new AbortController();
  const stopIt = () => {
    // It may have ended before. Before it goes on, a turn has the id of the answer that was cut.
    if (turn.answerId && !turn.finish) call(addressOf(turn), { method: "DELETE" }).catch(() => {});
    controller.abort();
  };
  const one = { chat, stop: stopIt, view: null, goesOn: false, skip: 0, skipThought: 0 };
  const { promise: over, resolve: end } = Promise.withResolvers();
  running.set(turn.id, one);
  live.add(turn.id);
  noteChange();
  navigator.locks?.request(lockOf(turn), () => over);
  const saving = setInterval(() => saveChat(chat, { isPart: true }), EVERY);
  try {
    await read(one, controller.signal);
    turn.state = "done";
  } catch (error) {
    turn.state = error.name === "AbortError" || error.code === "answer_stopped" ? "stopped" : "failed";
    if (turn.state === "failed") turn.error = error instanceof ApiError ? told(error, turn) : "The server cannot be reached.";
    turn.isTooLong = error.code === TOO_LONG;
    turn.mayCome = error.mayCome;
  }
  ended();
  clearInterval(saving);
  running.delete(turn.id);
  chat.updated = Date.now();
  await saveChat(chat);
  live.delete(turn.id);
  end();
  noteChange();
  await noteSegments(chat, turn);
  one.view?.end();
}

/** A connection that broke is no end: the server goes on. @throws what is no such thing */
async function fetchLost(error, turn, one, signal) {
  if (!turn.answerId || error instanceof ApiError || error.name === "AbortError") throw error;
  await fetchAnswer(turn, one, signal);
}

const TOO_LONG = "context_length_exceeded";

/** The words of an error. A file that the server has forgotten is marked. */
function told({ code, param, message, details }, { searched = [] }) {
  if (code === TOO_LONG && details.n_prompt_tokens && details.n_ctx) {
    const about = /\babout \d/.test(message) ? "about " : "";
    return `Too long for this model: ${about}${figure(details.n_prompt_tokens)} of ${figure(details.n_ctx)} tokens.`;
  }
  const lost = code === "file_not_found" && searched[Number(/\d+/.exec(param))];
  if (!lost) return message;
  lost.gone = true;
  return `${lost.name} is no longer on the server. Drop it again and answer again, or ask without it.`;
}

async function readAnswer(chat, turn, one, signal, isWhole = false) {
  const asked = questionFields(chat, turn, await documentsFor(turnsToSend(chat, turn, isWhole).unknown), isWhole);
  const body = {
    ...(one.goesOn ? continuing(turn, asked) : asked),
    ...requestFields(),
    ...modelField(),
    cache_prompt: true,
    store: true,
    on_disconnect: "finish",
    return_progress: true,
    report_segments: true,
  };
  if (one.goesOn) Object.assign(one, { skip: turn.answer.length, skipThought: turn.thought.length });
  try {
    for await (const event of stream("v1/chat/completions", body, signal)) {
      if (event.id && turn.answerId !== event.id) begin(chat, turn, event.id, one); // a second try has another one
      take(event, turn, one);
    }
  } catch (error) {
    if (error.code !== "previous_response_not_found" || isWhole) throw error;
    await readAnswer(chat, turn, one, signal, true);
  }
}

/** From now on the server finishes the answer, and another page may fetch it. */
function begin(chat, turn, id, { goesOn }) {
  turn.answerId = id;
  if (goesOn) changeTurn(turn, { finish: undefined, remembered: false });
  saveChat(chat);
}

/** The documents that were found for turns, by their ids; those of the folder that are still there. */
async function documentsFor(turns) {
  const byId = new Map(foundIn(turns).map((one) => [one.id, one]));
  const found = await Promise.allSettled([...byId.values()].map((one) => (one.text === undefined ? place(one.id) : one)));
  return new Map(found.filter(({ value }) => value).map(({ value: { id, title, text } }) => [id, { id, title, text }]));
}

function take(event, turn, one) {
  if (event.prompt_progress) {
    turn.progress = event.prompt_progress;
    one.view?.progress();
  }
  const [choice] = event.choices;
  const thought = rest(choice?.delta.reasoning_content, one, "skipThought");
  const content = rest(choice?.delta.content, one, "skip");
  if (thought) {
    turn.thought += thought;
    one.view?.thought(thought);
  }
  if (content) {
    turn.answer += content;
    one.view?.text(content);
  }
  if (event.slotcache) {
    const { slotcache: report, timings, id } = event;
    Object.assign(turn, { report, timings, answerId: id, finish: choice?.finish_reason ?? turn.finish });
    turn.remembered = report.conversation?.remembered ?? false;
  }
}

/** What of a piece the turn has not. An answer that goes on is sent from its beginning. */
function rest(piece, one, name) {
  const had = one[name];
  one[name] = Math.max(had - (piece?.length ?? 0), 0);
  return piece?.slice(had);
}

async function noteSegments(chat, turn) {
  await saveSegments(segmentRows(chat, turn));
}

/**
 * Let the server read documents before their question is complete. It does so when it has nothing else to do.
 * @param {import("./chat.js").Chat} chat
 * @param {import("./chat.js").Turn} draft
 * @returns {Promise<void>}
 */
export async function readAhead(chat, draft) {
  const { conversation, ...fields } = questionFields(chat, draft);
  const body = { ...fields, ...scopeField(), ...modelField(), cache_prompt: true, id: chat.id };
  await call("v1/speculate", { body }).catch(() => {}); // only a favour: the question itself tells of errors
}

/**
 * Forget answers on the server, too.
 * @param {import("./chat.js").Turn[]} turns
 * @param {boolean} [keepalive]  although the page goes
 */
export async function forgetAnswers(turns, keepalive = false) {
  const answered = turns.filter(({ answerId }) => answerId);
  await Promise.allSettled(answered.map((turn) => call(addressOf(turn), { method: "DELETE", keepalive })));
}

/** Forget a chat on the server, too. @param {string} id @param {boolean} [keepalive]  although the page goes */
export async function forget(id, keepalive = false) {
  const all = modelNames().length ? modelNames() : [undefined]; // each model that was asked remembers its own turns
  const forgotten = all.map((model) => call(`v1/conversations/${id}${scopeQuery({ model })}`, { method: "DELETE", keepalive }));
  await Promise.allSettled(forgotten); // it may have forgotten it before
}
