/** The tree of cached runs, drawn from left to right: what stands left of a branch is shared by all that stand right of it. */

import { brief, figure, h } from "./dom.js";
import { textOf } from "./known.js";
import { behind, inFront, layOut } from "./runs.js";
import { loadSegments } from "./store.js";

const ROW = 22; // px
const MOST_ROWS = 300;
const LEGIBLE = 36; // px: narrower blocks have no text
const LEAST = 12; // px: the width of a block at least
const PLACES = { device: "on the device", host: "in host memory", ahead: "being computed" };

/** The tree on the screen, and what is known of the chosen run. */
export class TreeView {
  constructor() {
    this._names = new Map();
    this._elements = new Map();
    this._blocks = [];
    this._chosen = null;
    this._told = h("p.soft");
    this._tree = h("div.tree", { role: "tree", "aria-label": "Cached prompts", onkeydown: (event) => this._pressed(event) });
    this._about = h("div.about", { "aria-live": "polite" });
    this.element = h("section.panel.cached", {}, h("h2", {}, "Cached prompts"), this._told, legend(),
      h("div.frame", {}, this._tree), this._about);
  }

  /** Learn which runs are this browser's own. */
  async learnNames() {
    this._names = new Map();
    for (const row of await loadSegments()) this._names.set(row.id, [...(this._names.get(row.id) ?? []), row]);
  }

  /**
   * @param {{tokens: {device: number, host: number}, runs: object[]}} cache  of `/v1/cache`
   * @param {object[]} slots  of `/slots`
   * @param {string} scope
   */
  show({ tokens, runs }, slots, scope) {
    const { blocks, rows, end } = layOut(runs, LEAST / Math.max(this._tree.clientWidth, 1));
    this._slots = new Map(slots.filter((slot) => slot.is_processing).map((slot) => [slot.sequence, slot.id]));
    this._blocks = blocks.filter(({ row }) => row < MOST_ROWS);
    const hidden = rows - MOST_ROWS;
    this._told.textContent = `${figure(tokens.device)} tokens on the device, ${figure(tokens.host)} in host memory, in the ${scope ? `scope “${scope}”` : "common scope"}.${hidden > 0 ? ` ${hidden} more rows are not drawn.` : ""}${runs.length ? "" : " Nothing is cached yet."}`;
    this._tree.style.height = `${Math.min(rows, MOST_ROWS) * ROW}px`;
    const before = this._elements;
    this._elements = new Map();
    for (const block of this._blocks) this._draw(block, end, before);
    for (const element of before.values()) element.remove();
    if (!this._elements.has(this._chosen)) this._choose(null);
    const first = this._elements.get(this._chosen) ?? this._elements.values().next().value;
    if (first) first.tabIndex = 0;
  }

  _draw(block, end, before) {
    const element = before.get(block.id) ?? h("button.run", { type: "button", role: "treeitem", onclick: () => this._choose(block.id) });
    before.delete(block.id);
    const { row, rows, start, tokens, run, place, level } = block;
    const name = this._nameOf(block);
    const slots = run.sequences.map((sequence) => this._slots.get(sequence)).filter((slot) => slot !== undefined);
    const label = `${name}, tokens ${start} to ${start + tokens}, ${PLACES[place]}${run.pinned ? ", pinned" : ""}${slots.length ? `, slot ${slots.join(", ")}` : ""}`;
    element.tabIndex = -1;
    element.textContent = (block.width / end) * this._tree.clientWidth < LEGIBLE ? "" : name;
    element.title = label;
    element.setAttribute("aria-label", label);
    element.setAttribute("aria-level", level);
    element.setAttribute("aria-selected", String(block.id === this._chosen));
    Object.assign(element.dataset, { place, disk: run.disk, pinned: run.pinned, busy: run.in_use, shared: block.children.length > 1, own: this._rowsOf(block).length > 0 });
    Object.assign(element.style, { left: `${(100 * block.left) / end}%`, width: `${(100 * block.width) / end}%`, top: `${row * ROW}px`, height: `${rows * ROW - 2}px` });
    this._elements.set(block.id, element);
    if (!element.isConnected) this._tree.append(element);
  }

  _rowsOf(block) {
    return block.ids.flatMap((id) => this._names.get(id) ?? []);
  }

  _nameOf(block) {
    for (const one of behind(block)) {
      const rows = this._rowsOf(one);
      if (rows.length) return one !== block && block.children.length > 1 ? `Prefix of ${namesOf(rows)}` : namesOf(rows);
    }
    for (const one of inFront(block)) {
      const rows = this._rowsOf(one);
      if (rows.some(({ isLast }) => isLast)) return "An answer, and the prefix of the next turn";
      if (rows.length) break;
    }
    return "Another client’s";
  }

  /** The titles of this browser's chats whose prompts go through a block. */
  _chatsOf(block) {
    const chats = new Map();
    for (const one of behind(block)) for (const row of this._rowsOf(one)) chats.set(row.chat, row.title);
    return chats;
  }

  async _choose(id) {
    this._elements.get(this._chosen)?.setAttribute("aria-selected", "false");
    this._chosen = id;
    const block = this._blocks.find((one) => one.id === id);
    if (!block) {
      this._about.replaceChildren();
      return;
    }
    this._elements.get(id).setAttribute("aria-selected", "true");
    const rows = this._rowsOf(block).filter(({ kind }) => kind !== "template");
    const texts = await Promise.all([...new Map(rows.map((row) => [row.name, row])).values()].map(textOf));
    if (this._chosen === id) this._about.replaceChildren(...this._factsOf(block, texts.filter(Boolean)));
  }

  _factsOf(block, texts) {
    const { run, start, tokens, place } = block;
    const copies = [PLACES[place], run.host && place === "device" && "a copy in host memory", run.disk && "written to disk"].filter(Boolean);
    const chats = [...this._chatsOf(block)].map(([id, title]) => h("li", {}, h("a", { href: `#/chat/${id}` }, title)));
    const facts = [["Tokens", `${figure(start)} to ${figure(start + tokens)} of the prompt`], ["KV", copies.join(", ")],
      ["Used", `by ${figure(run.frequency)} ${run.frequency === 1 ? "request" : "requests"}${run.in_use ? ", by one that runs now, too" : ""}`],
      ["Pinned", run.pinned ? "yes: it is evicted last" : "no"]];
    return [h("h3", {}, this._nameOf(block)), h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      h("p", {}, chats.length ? "Chats of this browser that share it:" : "No chat of this browser goes through it. The server shows no text."),
      chats.length ? h("ul", {}, chats) : "", ...texts.map((text) => h("blockquote", {}, brief(text, 400)))];
  }

  _pressed(event) {
    const block = this._blocks.find(({ id }) => this._elements.get(id) === document.activeElement);
    if (!block) return;
    const at = this._blocks.indexOf(block);
    const to = { ArrowLeft: block.parent, ArrowRight: block.children[0], ArrowUp: this._blocks[at - 1], ArrowDown: this._blocks[at + 1], Home: this._blocks[0], End: this._blocks.at(-1) }[event.key];
    if (!to) return;
    event.preventDefault();
    this._elements.get(block.id).tabIndex = -1;
    const element = this._elements.get(to.id);
    element.tabIndex = 0;
    element.focus();
  }
}

function namesOf(rows) {
  const telling = rows.filter(({ kind }) => kind !== "template");
  return [...new Set((telling.length ? telling : rows).map(({ name }) => name))].join(" · ");
}

function legend() {
  const kinds = [["device", "device"], ["host", "host memory"], ["disk", "also on disk"], ["pinned", "pinned"], ["busy", "in use"]];
  return h("ul.legend", {}, kinds.map(([kind, text]) => h("li", { data: { kind } }, text)));
}
