/** The bar under an answer: its prompt, segment by segment, with what was cached, and where, and what was computed. */

import { duration, figure, h } from "./dom.js";
import { PLACES, kindOf, missText, nameOf, placeOf } from "./names.js";

/**
 * @typedef {{name: string, kind: string, tokens: number, parts: Record<string, number>, saved: number}} Segment
 *   parts: tokens by place: device, host, disk, computed
 */

/**
 * Return a report's segments as they are drawn: text of the chat template belongs to the message behind it. Before the first
 * document it is a segment of its own: what the model is told of documents stands there.
 * @param {object} report  `slotcache` of an answer
 * @param {string[]} names  of its segments
 * @returns {Segment[]}
 */
export function segmentsOf(report, names) {
  const segments = [];
  const kinds = report.segments.map(({ label }) => kindOf(label));
  const first = kinds.findIndex((kind) => kind !== "template");
  let before = null;
  report.segments.forEach((row, at) => {
    const kind = kinds[at];
    const one = joined(before, { name: names[at], kind, tokens: row.tokens, parts: partsOf(row), saved: row.saved_ms });
    const isStart = at === first - 1 && kinds[first] === "document";
    before = kind === "template" && !isStart ? one : null;
    if (!before) segments.push(isStart ? { ...one, name: "Start of the prompt" } : one);
  });
  return before ? [...segments, { ...before, name: "Start of the answer" }] : segments;
}

function partsOf({ tokens, cached_tokens: cached }) {
  const parts = {};
  let computed = tokens;
  for (const [source, number] of Object.entries(cached)) {
    parts[placeOf(source)] = (parts[placeOf(source)] ?? 0) + number;
    computed -= number;
  }
  return computed ? { ...parts, computed } : parts;
}

function joined(before, after) {
  if (!before) return after;
  const parts = { ...before.parts };
  for (const [place, number] of Object.entries(after.parts)) parts[place] = (parts[place] ?? 0) + number;
  return { ...after, tokens: before.tokens + after.tokens, parts, saved: before.saved + after.saved };
}

/**
 * Make the account of an answer: the bar, its figures in a line, and on demand a table and the miss in words.
 * @param {import("./chat.js").Turn} turn
 * @param {{titleOf: (id: string) => string|undefined, names: string[], isFirst: boolean}} context  names: of the segments
 * @returns {HTMLElement}
 */
export function account(turn, { titleOf, names, isFirst }) {
  const { report, timings } = turn;
  const segments = segmentsOf(report, names);
  const total = timings.cache_n + timings.prompt_n;
  const summary = summaryOf(turn, segments);
  return h(
    "details.account",
    {},
    h("summary", {}, drawn(segments, `${summary.map(({ text }) => text).join(", ")}`), h("span.figures", {}, summary.map(swatch))),
    h("p.miss", {}, missText(report.miss, titleOf, isFirst), turn.why ? ` ${branchText(turn, total)}` : null),
    report.reordered && ranks(turn, titleOf),
    table(segments),
  );
}

/** The figures of an answer; those of a place have its colour in front. */
function summaryOf({ report, timings }, segments) {
  const sums = segments.reduce((sum, { parts }) => joined({ parts: sum }, { parts }).parts, {});
  const saved = segments.reduce((sum, segment) => sum + segment.saved, 0);
  const share = Math.floor((100 * timings.cache_n) / Math.max(timings.cache_n + timings.prompt_n, 1));
  const cached = Object.keys(PLACES).filter((place) => sums[place]).map((place) => ({ place, text: `${figure(sums[place])} ${PLACES[place].text}` }));
  return [
    ...cached,
    { place: "computed", text: `${figure(timings.prompt_n)} computed` },
    { text: `${share} % cached` },
    saved >= 1 && { text: `${duration(saved)} saved` },
    report.reordered?.gained_ms >= 1 && { text: `documents moved: ${duration(report.reordered.gained_ms)} gained` },
    { text: `first token after ${duration(timings.queue_ms + timings.prompt_ms)}` },
    timings.predicted_n > 1 && { text: `${figure(timings.predicted_per_second)} tokens/s` },
  ].filter(Boolean);
}

function branchText(turn, total) {
  const act = turn.why === "edit" ? "The edited question" : "This second answer";
  return `${act} cost ${figure(turn.timings.prompt_n)} prompt tokens instead of ${figure(total)}.`;
}

/** The documents that a question brings, in prompt order, with their ranks: not those that an earlier turn shows. */
function ranks({ documents, report }, titleOf) {
  const own = new Set([...documents, ...(report.retrieved ?? [])].map(({ id }) => id));
  const read = report.documents.filter(({ id }) => own.has(id) && !report.repeated.includes(id));
  const names = read.map(({ id, rank }) => `“${nameOf(`document ${id}`, titleOf)}” (rank ${rank})`);
  return names.length > 0 && h("p.ranks", {}, `Documents in prompt order: ${names.join(", ")}.`);
}

function swatch({ place, text }) {
  return h("span", {}, place ? h("i.swatch", { data: { place } }) : null, text);
}

/**
 * Make a bar.
 * @param {Segment[]} segments
 * @param {string} label  for those who cannot see it
 * @returns {HTMLElement}
 */
export function drawn(segments, label) {
  const bar = h("span.bar", { role: "img", "aria-label": label });
  for (const { name, kind, tokens, parts, saved } of segments) {
    const hint = `${name}: ${textOf(parts)}${saved >= 1 ? `, ${duration(saved)} saved` : ""}`;
    const segment = h("span.segment", { title: hint, data: { kind } }, ...Object.entries(parts).map(strip));
    segment.style.flexGrow = tokens;
    bar.append(segment);
  }
  return bar;
}

function strip([place, tokens]) {
  const element = h("span.strip", { data: { place } });
  element.style.flexGrow = tokens;
  return element;
}

/**
 * Make the bar of a prompt that is being computed.
 * @param {{total: number, cache: number, processed: number}} progress
 * @returns {HTMLElement}
 */
export function progressBar({ total, cache, processed }) {
  const parts = { device: cache, computed: processed - cache, ahead: total - processed };
  const told = `Prefill: ${figure(processed)} of ${figure(total)} tokens`;
  const known = Object.fromEntries(Object.entries(parts).filter(([, number]) => number > 0));
  return h("div.account.reading", {}, drawn([{ name: told, kind: "question", tokens: total, parts: known, saved: 0 }], told),
    h("span.figures", {}, h("span", {}, told), cache ? h("span", {}, `${figure(cache)} cached`) : null));
}

function table(segments) {
  const row = ({ name, kind, tokens, parts, saved }) =>
    h("tr", {}, h("th", { scope: "row", data: { kind } }, name), h("td", {}, figure(tokens)), h("td", {}, textOf(parts)),
      h("td", {}, saved >= 1 ? duration(saved) : "–"));
  const heads = ["Part of the prompt", "Tokens", "Cached or computed", "Saved"];
  return h("div.wide", {}, h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, segments.map(row))));
}

function textOf(parts) {
  const cached = Object.entries(parts).filter(([place]) => PLACES[place]);
  const texts = cached.map(([place, tokens]) => `${figure(tokens)} ${PLACES[place].text}`);
  return [...texts, ...(parts.computed ? [`${figure(parts.computed)} computed`] : [])].join(", ") || "waiting";
}
