/**
 * Markdown to elements. Three fences keep text from running as script: markdown-it writes no HTML that stands in the text,
 * DOMPurify leaves only the elements listed here, and the page's policy runs no script but the page's own files.
 */

import DOMPurify from "./vendor/purify.mjs";
import MarkdownIt from "./vendor/markdown-it.mjs";
import { announce, button, h } from "./dom.js";

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true });
const { rules } = markdown.renderer;

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

const TAGS = "p br hr h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code em strong s a table thead tbody tr th td".split(" ");
const PURIFIED = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "title", "class", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/**
 * @param {string} source
 * @returns {DocumentFragment}
 */
export function render(source) {
  const about = {};
  return elementsOf(markdown.parse(source, about), about);
}

function elementsOf(tokens, about) {
  const fragment = DOMPurify.sanitize(markdown.renderer.render(tokens, markdown.options, about), PURIFIED);
  fragment.querySelectorAll("a").forEach(asOutside);
  fragment.querySelectorAll("pre").forEach(withTools);
  fragment.querySelectorAll("table").forEach(scrollable);
  return fragment;
}

function asOutside(link) {
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
}

function withTools(block) {
  const code = block.querySelector("code") ?? block;
  const language = /language-([\w+#.-]+)/.exec(code.className)?.[1] ?? "";
  const copy = () => navigator.clipboard?.writeText(code.textContent).then(() => announce("Copied"));
  const tools = h("div.tools", {}, h("span", {}, language), button("Copy", copy));
  block.tabIndex = 0; // it may scroll
  surround(block, h("div.code", {}, tools));
}

function scrollable(table) {
  surround(table, h("div.wide", { tabindex: "0", role: "region", "aria-label": "Table" }));
}

function surround(element, around) {
  element.replaceWith(around);
  around.append(element);
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
    const refers = /^ {0,3}\[[^\]]+\]:/m.test(this.text); // a link's address may stand below the link
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
    const about = {};
    const tokens = markdown.parse(open, about);
    const last = Math.max(tokens.findLastIndex(beginsBlock), 0);
    if (last) {
      this._tail.before(elementsOf(tokens.slice(0, last), about));
      this._finished += lengthOf(open, tokens[last].map[0]);
    }
    this._tail.replaceChildren(elementsOf(tokens.slice(last), about));
    this._rest = now + 4 * (performance.now() - began);
  }
}

const beginsBlock = (token) => token.level === 0 && token.map && token.nesting >= 0;

/** Return the length of the first lines of a text. */
function lengthOf(source, lines) {
  let length = 0;
  for (let at = 0; at < lines; at += 1) length = source.indexOf("\n", length) + 1;
  return length;
}
