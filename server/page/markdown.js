/**
 * Markdown to elements. Three fences keep text from running as script: markdown-it writes no HTML that stands in the text,
 * DOMPurify leaves only the elements listed here, and the page's policy runs no script but the page's own files.
 */

import DOMPurify from "./vendor/purify.mjs";
import MarkdownIt from "./vendor/markdown-it.mjs";
import { dressCode } from "./code.js";
import { h } from "./dom.js";
import { addFormulas, drawFormulas } from "./formulas.js";
import { addNotes, dressNotes } from "./notes.js";

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true });
const { rules } = markdown.renderer;
addFormulas(markdown);
addNotes(markdown);

// An image would be a request to another host: it becomes a link. Styles would be refused: alignment becomes a class.
rules.image = (tokens, at) => {
  const { content, attrs } = tokens[at];
  const { escapeHtml } = markdown.utils;
  const source = attrs.find(([name]) => name === "src")[1];
  return `<a href="${escapeHtml(source)}">${escapeHtml(content || source)}</a>`;
};
for (const name of ["th_open", "td_open"]) {
  rules[name] = (tokens, at) => {
    const [, side] = /text-align:(\w+)/.exec(tokens[at].attrGet("style") ?? "") ?? [];
    return `<${tokens[at].tag}${side ? ` class="${side}"` : ""}>`;
  };
}

const TAGS = "p br hr h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong s sup span a table thead tbody tr th td".split(" ");
const PURIFIED = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "title", "class", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/**
 * Make the elements of a text.
 * @param {string} source
 * @returns {DocumentFragment}
 */
export function render(source) {
  return orText(source, () => {
    const about = {};
    return elementsOf(markdown.parse(source, about), about);
  });
}

/**
 * Return what a function draws of a text, and the text as it is where that fails: one answer never takes the page with it.
 * @param {string} text
 * @param {() => DocumentFragment} draw
 * @returns {DocumentFragment}
 */
export function orText(text, draw) {
  try {
    return draw();
  } catch (error) {
    console.info("An answer is shown as text:", error);
    const fragment = document.createDocumentFragment();
    fragment.append(h("p.undrawn", {}, text));
    return fragment;
  }
}

/** isFinished: the blocks stay as they are. */
function elementsOf(tokens, about, isFinished = true) {
  const fragment = DOMPurify.sanitize(markdown.renderer.render(tokens, markdown.options, about), PURIFIED);
  fragment.querySelectorAll("a").forEach(asOutside);
  fragment.querySelectorAll("table").forEach(scrollable);
  dressCode(fragment, isFinished);
  dressNotes(fragment);
  drawFormulas(fragment);
  return fragment;
}

function asOutside(link) {
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
}

function scrollable(table) {
  const around = h("div.wide", { tabindex: "0", role: "region", "aria-label": "Table" });
  table.replaceWith(around);
  around.append(table);
}

/**
 * Shows Markdown that is still being written. At each frame only the last block is made anew: the blocks before it are
 * finished, since a block ends where the next one begins.
 */
export class MarkdownStream {
  /** @param {HTMLElement} container */
  constructor(container) {
    this.text = "";
    this._container = container;
    this._tail = h("div.tail");
    this._finished = 0; // characters whose blocks are finished
    this._frame = 0;
    this._rest = 0; // ms until the next drawing, so that drawing takes a quarter of the time at most
    container.replaceChildren(this._tail);
  }

  /** Add text; it is drawn with the next frame. @param {string} text */
  push(text) {
    this.text += text;
    this._frame ||= requestAnimationFrame((now) => this._draw(now));
  }

  /** Draw the whole text for good. */
  finish() {
    cancelAnimationFrame(this._frame);
    const refers = /^ {0,3}\[[^\]]{1,999}\]:/m.test(this.text); // a link's address may stand below the link, and a footnote
    if (refers) this._container.replaceChildren(render(this.text));
    else this._tail.replaceWith(render(this.text.slice(this._finished)));
  }

  _draw(now) {
    if (now < this._rest) {
      this._frame = requestAnimationFrame((later) => this._draw(later));
      return;
    }
    this._frame = 0;
    const began = performance.now();
    const open = this.text.slice(this._finished);
    this._tail.replaceChildren(orText(open, () => this._drawn(open)));
    this._rest = now + 4 * (performance.now() - began);
  }

  /** Put the finished blocks of a text before the tail; return what stands in it now. */
  _drawn(open) {
    const about = {};
    const tokens = markdown.parse(open, about);
    const last = Math.max(tokens.findLastIndex(beginsBlock), 0);
    const rest = elementsOf(tokens.slice(last), about, false);
    if (last) {
      this._tail.before(elementsOf(tokens.slice(0, last), about));
      this._finished += lengthOf(open, tokens[last].map[0]);
    }
    return rest;
  }
}

const beginsBlock = (token) => token.level === 0 && token.map && token.nesting >= 0;

/** Return the length of the first lines of a text. */
function lengthOf(source, lines) {
  let length = 0;
  for (let at = 0; at < lines; at += 1) length = source.indexOf("\n", length) + 1;
  return length;
}
