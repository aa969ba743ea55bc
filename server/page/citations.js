/** Citations of an answer: the places where it names or quotes a document, as buttons that open the source. */

import { h } from "./dom.js";
import { render } from "./markdown.js";

const OPEN = "\uE000"; // around the number of a source, in the Markdown; a private character, which no text means
const CLOSE = "\uE001";
const MARKS = /[\uE000\uE001]/g;
const NAMED = /\[([^\][\n]{1,200})\]/g;

/**
 * Return the citations of an answer: the server's, or else the ids in brackets of documents that are known.
 * @param {string} text
 * @param {object} report  `slotcache` of the answer
 * @param {(id: string) => boolean} isKnown
 * @returns {{id: string, start: number, stop: number, quote?: boolean}[]} spans in UTF-16 units
 */
export function citationsOf(text, report, isKnown) {
  if (!report?.citations) {
    return [...text.matchAll(NAMED)]
      .filter(([, id]) => isKnown(id))
      .map((match) => ({ id: match[1], start: match.index, stop: match.index + match[0].length }));
  }
  const place = placesOf(text);
  return report.citations.map((one) => ({ ...one, start: place(one.start), stop: place(one.stop) }));
}

/** The server counts characters, JavaScript counts UTF-16 units. */
function placesOf(text) {
  if (!/[\uD800-\uDBFF]/.test(text)) return (at) => at;
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
 * @param {{id: string, start: number, stop: number, quote?: boolean}[]} citations
 * @param {(number: number, citation: object) => {label: string, open: () => void}} describe
 * @returns {DocumentFragment}
 */
export function renderCited(text, citations, describe) {
  const ids = numbered(citations);
  const ordered = citations.map((one, at) => ({ ...one, at })).sort((one, other) => one.stop - other.stop);
  let source = "";
  let position = 0;
  for (const { start, stop, quote, at } of ordered) {
    if (start < position && !quote) continue;
    const end = quote ? Math.max(stop, position) : start;
    source += `${text.slice(position, end).replace(MARKS, "\uFFFD")}${OPEN}${at}${CLOSE}`;
    position = Math.max(stop, position);
  }
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
        const number = ids.indexOf(citation.id) + 1;
        const { label, open } = describe(number, citation);
        return h("button.cite", { type: "button", onclick: open, "aria-label": label, title: label }, String(number));
      }),
    );
  }
  return fragment;
}
