/** Questions on their way: one request each, its stream read into its turn, and ended by the reader or the server. */

import { ApiError, call, get, stream } from "./api.js";
import { foundBefore, live, questionFields } from "./chat.js";
import { figure } from "./dom.js";
import { segmentRows } from "./known.js";
import { askedModel, modelField, modelNames } from "./models.js";
import { requestFields, scopeField, scopeQuery, settings } from "./settings.js";
import { place } from "./sources.js";
import { saveChat, saveSegments } from "./store.js";

/**
 * @typedef {object} View  what shows a turn while its answer comes
 * @property {() => void} progress
 * @property {(text: string) => void} text
 * @property {(text: string) => void} thought
 * @property {(why: string) => void} wait  for a whole answer
 * @property {() => void} whole  the answer has come at once
 * @property {() => void} end
 */

const EVERY = 1000; // ms between two times that an answer is saved, and two looks at one that the server finishes

/** @type {Map<string, {chat: import("./chat.js").Chat, stop: () => void, view: View|null}>} by turn */
const running = new Map();

addEventListener("pagehide", () => {
  for (const { chat } of running.values()) saveChat(chat, { isPart: true });
});

/** @param {string} turn @returns {boolean} */
export function isRunning(turn) {
  return running.has(turn);
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
  Object.assign(turn, { model: askedModel(), scope: settings().scope });
  await run(chat, turn, async (one, signal) => {
    await saveChat(chat);
    await readAnswer(chat, turn, one, signal).catch((error) => fetchLost(error, turn, one, signal));
    if (!turn.finish && turn.answerId) await fetchAnswer(turn, one, signal);
  });
}

/**
 * Fetch an answer that the server finishes: the page that has asked for it is gone, or another one.
 * @param {import("./chat.js").Chat} chat
 * @param {import("./chat.js").Turn} turn  with `answerId`
 * @returns {Promise<void>}
 */
export async function resume(chat, turn) {
  await run(chat, turn, (one, signal) => fetchAnswer(turn, one, signal));
}

async function run(chat, turn, read) {
  const controller = new AbortController();
  const stopIt = () => {
    if (turn.answerId) call(addressOf(turn), { method: "DELETE" }).catch(() => {}); // it may have ended before
    controller.abort();
  };
  const one = { chat, stop: stopIt, view: null };
  running.set(turn.id, one);
  live.add(turn.id);
  const saving = setInterval(() => saveChat(chat, { isPart: true }), EVERY);
  try {
    await read(one, controller.signal);
    turn.state = "done";
  } catch (error) {
    turn.state = error.name === "AbortError" || error.code === "answer_stopped" ? "stopped" : "failed";
    if (turn.state === "failed") turn.error = error instanceof ApiError ? told(error, turn) : "The server cannot be reached.";
    turn.isTooLong = error.code === TOO_LONG;
  }
  clearInterval(saving);
  running.delete(turn.id);
  chat.updated = Date.now();
  await saveChat(chat);
  live.delete(turn.id);
  await noteSegments(chat, turn);
  one.view?.end();
}

/** A connection that broke is no end: the server goes on. @throws what is no such thing */
async function fetchLost(error, turn, one, signal) {
  if (!turn.answerId || error instanceof ApiError || error.name === "AbortError") throw error;
  await fetchAnswer(turn, one, signal);
}

/** Look at an answer until the server has the whole of it. */
async function fetchAnswer(turn, one, signal) {
  for (;;) {
    const found = await get(addressOf(turn), { signal }).catch((error) => {
      if (error.name === "AbortError") throw error;
      if (error.status === 404) throw new ApiError(404, { message: LOST });
      return { status: error instanceof ApiError ? error.message : "The server cannot be reached." };
    });
    if (!found.status) return takeWhole(found, turn, one.view);
    if (found.choices) takeMore(found.choices[0].message.content, turn, one.view);
    one.view?.wait(found.status === "in_progress" ? "The server finishes this answer" : found.status);
    await new Promise((resolve) => setTimeout(resolve, EVERY));
    signal.throwIfAborted();
  }
}

const LOST = "The server has no more of this answer: it was stopped, or the server was. Answer again asks anew.";

function addressOf({ answerId, scope, model }) {
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

const TOO_LONG = "context_length_exceeded";

/** The words of an error. A file that the server has forgotten is marked. */
function told({ code, param, message, details }, { searched = [] }) {
  if (code === TOO_LONG) {
    const about = /\babout \d/.test(message) ? "about " : "";
    return `Too long for this model: ${about}${figure(details.n_prompt_tokens)} of ${figure(details.n_ctx)} tokens.`;
  }
  const lost = code === "file_not_found" && searched[Number(/\d+/.exec(param))];
  if (!lost) return message;
  lost.gone = true;
  return `${lost.name} is no longer on the server. Drop it again and answer again, or ask without it.`;
}

async function readAnswer(chat, turn, one, signal, found) {
  const body = {
    ...questionFields(chat, turn, found),
    ...requestFields(),
    ...modelField(),
    cache_prompt: true,
    store: true,
    on_disconnect: "finish",
    return_progress: true,
    report_segments: true,
  };
  try {
    for await (const event of stream("v1/chat/completions", body, signal)) {
      if (event.id && turn.answerId !== event.id) begin(chat, turn, event.id); // a second try has another one
      take(event, turn, one.view);
    }
  } catch (error) {
    if (error.code !== "previous_response_not_found" || found) throw error;
    await readAnswer(chat, turn, one, signal, await documentsBefore(chat, turn));
  }
}

/** From now on the server finishes the answer, and another page may fetch it. */
function begin(chat, turn, id) {
  turn.answerId = id;
  saveChat(chat);
}

/** The documents of earlier searches, by their ids; those of the folder that are still there. */
async function documentsBefore(chat, turn) {
  const byId = new Map(foundBefore(chat, turn).map((one) => [one.id, one]));
  const found = await Promise.allSettled([...byId.values()].map((one) => (one.text === undefined ? place(one.id) : one)));
  return new Map(found.filter(({ value }) => value).map(({ value: { id, title, text } }) => [id, { id, title, text }]));
}

function take(event, turn, view) {
  if (event.prompt_progress) {
    turn.progress = event.prompt_progress;
    view?.progress();
  }
  const [choice] = event.choices;
  const { content, reasoning_content: thought } = choice?.delta ?? {};
  if (thought) {
    turn.thought += thought;
    view?.thought(thought);
  }
  if (content) {
    turn.answer += content;
    view?.text(content);
  }
  if (event.slotcache) {
    const { slotcache: report, timings, id } = event;
    Object.assign(turn, { report, timings, answerId: id, finish: choice?.finish_reason ?? turn.finish });
    turn.remembered = report.conversation?.remembered ?? false;
  }
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

/** Forget a chat on the server, too. @param {string} id @param {boolean} [keepalive]  although the page goes */
export async function forget(id, keepalive = false) {
  const all = modelNames().length ? modelNames() : [undefined]; // each model that was asked remembers its own turns
  const forgotten = all.map((model) => call(`v1/conversations/${id}${scopeQuery({ model })}`, { method: "DELETE", keepalive }));
  await Promise.allSettled(forgotten); // it may have forgotten it before
}
