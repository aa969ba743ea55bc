/** Citations of an answer: the places where it names or quotes a document, as buttons that open the source. */

import { h } from "./dom.js";
import { render } from "./markdown.js";

const OPEN = "\uE000"; // around the number of a source, in the Markdown; a private character, which no text means
const CLOSE = "\uE001";
const MARKS = /[\uE000\uE001]/g;
const SENTENCE_END = /[.!?…]?["'”’»)]*/y;
const NAMED = /\[([^\][\n]{1,200})\]/g;

/**
 * @typedef {{id: string, start: number, stop: number, quoted?: [number, number]}} Citation
 *   spans in UTF-16 units: the name of a document or, where there is none, the place behind a quote; and the quote
 */

/**
 * Return the citations of an answer: the server's, or else the ids in brackets of documents that are known.
 * @param {string} text
 * @param {object} report  `slotcache` of the answer
 * @param {(id: string) => boolean} isKnown
 * @returns {Citation[]}
 */
export function citationsOf(text, report, isKnown) {
  if (!report?.citations) {
    return [...text.matchAll(NAMED)]
      .filter(([, id]) => isKnown(id))
      .map((match) => ({ id: match[1], start: match.index, stop: match.index + match[0].length }));
  }
  const place = placesOf(text);
  const citations = [];
  for (const one of report.citations) {
    const { id, quote } = one;
    const [start, stop] = [place(one.start), place(one.stop)];
    const before = citations.at(-1);
    if (quote) {
      const end = behindSentence(text, stop);
      citations.push({ id, start: end, stop: end, quoted: [start, stop] });
    } else if (before?.id === id && before.start === before.stop && isBetween(text, before.stop, start)) {
      citations.splice(-1, 1, { ...before, start, stop }); // the name right behind a quote: the two are one citation
    } else {
      citations.push({ id, start, stop });
    }
  }
  return citations.sort((one, other) => one.start - other.start);
}

/** A quote that ends a sentence has its citation behind the full stop. */
function behindSentence(text, at) {
  SENTENCE_END.lastIndex = at;
  return at + SENTENCE_END.exec(text)[0].length;
}

/** Whether nothing but spaces and signs stands between two places. */
function isBetween(text, from, to) {
  return from <= to && to - from < 9 && /^[\s\p{P}]*$/u.test(text.slice(from, to));
}

/** The server counts characters, JavaScript counts UTF-16 units. */
function placesOf(text) {
  if (!/[\uD800-\uDBFF]/.test(text)) return (at) => Math.min(at, text.length);
  const units = [0];
  for (const character of text) units.push(units.at(-1) + character.length);
  return (at) => units[Math.min(at, units.length - 1)];
}

/** @param {{id: string}[]} citations @returns {string[]} the ids of the sources, each once: their numbers begin with 1 */
export function numbered(citations) {
  return [...new Set(citations.map(({ id }) => id))];
}

/**
 * Make the elements of an answer with a button at each citation: in place of a name, behind a quote.
 * @param {string} text
 * @param {Citation[]} citations  in order
 * @param {(number: number, citation: object) => {label: string, open: () => void}} describe
 * @returns {DocumentFragment}
 */
export function renderCited(text, citations, describe) {
  const ids = numbered(citations);
  let source = "";
  let position = 0;
  citations.forEach(({ start, stop }, at) => {
    if (start < position || stop < start) return;
    source += `${text.slice(position, start).replace(MARKS, "\uFFFD")}${OPEN}${at}${CLOSE}`;
    position = stop;
  });
  const fragment = render(source + text.slice(position).replace(MARKS, "\uFFFD"));
  const walker = document.createTreeWalker(fragment, NodeFilter.SHOW_TEXT);
  const marked = [];
  while (walker.nextNode()) if (walker.currentNode.data.includes(OPEN)) marked.push(walker.currentNode);
  for (const node of marked) {
    const parts = node.data.split(/\uE000(\d+)\uE001/);
    node.replaceWith(
      ...parts.map((part, place) => {
        if (place % 2 === 0) return part;
        const citation = citations[Number(part)];
        const said = text.slice(citation.start, citation.stop);
        const number = ids.indexOf(citation.id) + 1;
        const { label, open } = describe(number, citation);
        return h("button.cite", { type: "button", onclick: open, "aria-label": label, title: label, data: { said } }, String(number));
      }),
    );
  }
  return fragment;
}
