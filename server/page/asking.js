/** Questions on their way: one request each, its stream read into its turn, and ended by the reader or the server. */

import { ApiError, call, stream } from "./api.js";
import { foundBefore, questionFields } from "./chat.js";
import { segmentRows } from "./known.js";
import { askedModel, modelField, modelNames } from "./models.js";
import { requestFields, scopeField, scopeQuery } from "./settings.js";
import { place } from "./sources.js";
import { saveChat, saveSegments } from "./store.js";

/**
 * @typedef {object} View  what shows a turn while its answer comes
 * @property {() => void} progress
 * @property {(text: string) => void} text
 * @property {(text: string) => void} thought
 * @property {() => void} end
 */

/** @type {Map<string, {stop: () => void, view: View|null}>} by turn */
const running = new Map();

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
 * Ask the question of a turn, and keep the chat when the answer has ended.
 * @param {import("./chat.js").Chat} chat
 * @param {import("./chat.js").Turn} turn
 * @returns {Promise<void>}
 */
export async function ask(chat, turn) {
  const controller = new AbortController();
  const one = { stop: () => controller.abort(), view: null };
  running.set(turn.id, one);
  turn.model = askedModel();
  try {
    await saveChat(chat);
    await readAnswer(chat, turn, one, controller.signal);
    turn.state = "done";
  } catch (error) {
    turn.state = error.name === "AbortError" ? "stopped" : "failed";
    if (turn.state === "failed") turn.error = error instanceof ApiError ? told(error, turn) : "The server cannot be reached.";
  }
  running.delete(turn.id);
  chat.updated = Date.now();
  await saveChat(chat);
  await noteSegments(chat, turn);
  one.view?.end();
}

/** The words of an error. A file that the server has forgotten is marked. */
function told({ code, param, message }, { searched = [] }) {
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
    return_progress: true,
    report_segments: true,
  };
  try {
    for await (const event of stream("v1/chat/completions", body, signal)) take(event, turn, one.view);
  } catch (error) {
    if (error.code !== "previous_response_not_found" || found) throw error;
    await readAnswer(chat, turn, one, signal, await documentsBefore(chat, turn));
  }
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

/** Forget a chat on the server, too. @param {string} id */
export async function forget(id) {
  const all = modelNames().length ? modelNames() : [undefined]; // each model that was asked remembers its own turns
  const forgotten = all.map((model) => call(`v1/conversations/${id}${scopeQuery({ model })}`, { method: "DELETE" }));
  await Promise.allSettled(forgotten); // it may have forgotten it before
}
