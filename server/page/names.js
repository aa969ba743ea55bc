/** The server's words about a prompt as words for a reader: parts of a prompt, places of reuse, reasons of a miss. */

import { brief } from "./dom.js";

const MESSAGE = /^message (\d+) \((\w+)\)(, which the template writes in other words,)?/;
const DOCUMENT = /^document (.+)$/s;

/** Where cached tokens came from: the sources of a report, in the order in which they are drawn. */
export const PLACES = {
  device: { sources: ["own", "fork"], text: "on the device" },
  host: { sources: ["host", "snapshot"], text: "from host memory" },
  disk: { sources: ["disk", "imported"], text: "from disk" },
};

/** @param {string} source  of a report @returns {keyof typeof PLACES} */
export function placeOf(source) {
  return Object.keys(PLACES).find((place) => PLACES[place].sources.includes(source)) ?? "device";
}

/**
 * @param {string} label  of a segment
 * @param {(id: string) => string|undefined} titleOf  the title of a document
 * @returns {string}
 */
export function nameOf(label, titleOf = () => undefined) {
  const [, at, role] = MESSAGE.exec(label) ?? [];
  if (role === "system") return "System prompt";
  if (role === "tool") return `Tool result ${at}`;
  if (role) return { user: "Question", assistant: "Answer" }[role] ?? role;
  const [, id] = DOCUMENT.exec(label) ?? [];
  if (id) return brief(titleOf(id) || id, 60);
  return { "the chat template": "Chat template", "the hints": "Hints" }[label] ?? label;
}

/** @param {string} label @returns {"system"|"question"|"answer"|"document"|"template"} */
export function kindOf(label) {
  const [, , role] = MESSAGE.exec(label) ?? [];
  if (role) return { system: "system", assistant: "answer" }[role] ?? "question";
  return DOCUMENT.test(label) ? "document" : "template";
}

/**
 * Say why reuse ended.
 * @param {{at: number, why: string}|null} miss
 * @param {(id: string) => string|undefined} titleOf
 * @param {boolean} isFirst  whether the chat begins with this turn
 * @returns {string} a sentence
 */
export function missText(miss, titleOf, isFirst) {
  if (!miss) return "The whole prompt was cached; only its last tokens were computed, as always.";
  const [, label, differs] = /^(.*) (?:is|are) not cached here(?:: (.*) differs)?$/s.exec(miss.why) ?? [];
  if (!label) return `Nothing came from the cache: ${miss.why}.`;
  const kind = kindOf(label);
  if (differs) return `Reuse ended inside “${nameOf(label, titleOf)}”, where ${differs} differs from what is cached.`;
  if (miss.at === 0) return "Nothing of this prompt is cached yet.";
  if (kind === "document") return `“${nameOf(label, titleOf)}” is not cached after this prefix: reuse ended there.`;
  if (kind === "question" && !isFirst) return "Everything before the question was cached; the question is new.";
  if (kind === "question") return "Only the question is new.";
  if (kind === "answer") return "The prompt shows an earlier answer in other words than the model sampled: reuse ended there.";
  return `Reuse ended at “${nameOf(label, titleOf)}”.`;
}
