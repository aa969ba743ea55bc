/** What GitHub's Markdown has beside the standard: lists of tasks, and footnotes. */

import { brief, button, h } from "./dom.js";

const TASK = /^\[([ xX])\] +/;
const NOTE = /^\[\^([^\s[\]^]{1,100})\]:[ \t]*/;
const REFERENCE = /\[\^([^\s[\]^]{1,100})\]/y;

/** Let Markdown know tasks and footnotes. @param {import("./vendor/markdown-it.mjs").default} markdown */
export function addNotes(markdown) {
  const { rules } = markdown.renderer;
  const { escapeHtml } = markdown.utils;
  markdown.core.ruler.push("task", findTasks);
  rules.task = (tokens, at) => `<span class="task">${tokens[at].content}</span>`;
  markdown.block.ruler.before("reference", "footnote", asNote, { alt: ["paragraph", "reference"] });
  markdown.inline.ruler.before("link", "footnote", asReference);
  rules.footnote_open = (tokens, at) => `<p class="footnote"><span class="mark">${escapeHtml(tokens[at].meta)}</span> `;
  rules.footnote_close = () => "</p>\n";
  rules.footnote = (tokens, at) => `<sup>${escapeHtml(tokens[at].meta)}</sup>`;
}

/** A point of a list that begins with a box. */
function findTasks({ tokens, Token }) {
  tokens.forEach((token, at) => {
    const [first] = token.children ?? [];
    const found = tokens[at - 2]?.type === "list_item_open" && first?.type === "text" && TASK.exec(first.content);
    if (!found) return;
    first.content = first.content.slice(found[0].length);
    token.children.unshift(Object.assign(new Token("task", "", 0), { content: found[1].toLowerCase() }));
    tokens[at - 2].attrJoin("class", "todo");
  });
}

/** A paragraph that says what a mark in the text means. It stays where it stands. */
function asNote(state, first, end, silent) {
  const lineOf = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]);
  const found = state.sCount[first] - state.blkIndent < 4 && NOTE.exec(lineOf(first));
  if (!found) return false;
  if (silent) return true;
  const lines = [lineOf(first).slice(found[0].length)];
  let line = first + 1;
  const others = state.md.block.ruler.getRules("paragraph");
  const goesOn = () => line < end && !state.isEmpty(line) && state.sCount[line] >= state.blkIndent && !others.some((rule) => rule(state, line, end, true));
  for (; goesOn(); line += 1) lines.push(lineOf(line));
  (state.env.notes ??= new Set()).add(found[1]);
  const map = [first, line];
  Object.assign(state.push("footnote_open", "p", 1), { map, meta: found[1] });
  Object.assign(state.push("inline", "", 0), { map, content: lines.join("\n").trim(), children: [] });
  state.push("footnote_close", "p", -1);
  state.line = line;
  return true;
}

function asReference(state, silent) {
  REFERENCE.lastIndex = state.pos;
  const found = state.src[state.pos] === "[" && state.env.notes && REFERENCE.exec(state.src);
  if (!found || !state.env.notes.has(found[1])) return false;
  if (!silent) state.push("footnote", "", 0).meta = found[1];
  state.pos += found[0].length;
  return true;
}

/** Make the boxes of tasks, and lead from each mark to its footnote, and back. @param {DocumentFragment} fragment */
export function dressNotes(fragment) {
  for (const task of fragment.querySelectorAll("span.task")) {
    const label = brief(task.parentElement.textContent.slice(task.textContent.length), 80) || "Task";
    task.replaceWith(h("input", { type: "checkbox", disabled: true, checked: task.textContent === "x", "aria-label": label }));
  }
  const notes = new Map();
  for (const note of fragment.querySelectorAll("p.footnote")) {
    note.tabIndex = -1;
    const mark = note.querySelector(".mark");
    if (!notes.has(mark.textContent)) notes.set(mark.textContent, { note, mark });
  }
  for (const reference of fragment.querySelectorAll("sup")) {
    const label = reference.textContent;
    const { note, mark } = notes.get(label) ?? {};
    if (!note) continue;
    const own = button(label, () => note.focus(), { class: "plain", "aria-label": `Footnote ${label}` });
    reference.replaceChildren(own);
    if (mark.firstElementChild) continue; // the way back leads to the first one
    mark.replaceChildren(button(label, () => own.focus(), { class: "plain", "aria-label": `Back to the text of footnote ${label}` }));
  }
}
