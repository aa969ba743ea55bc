/** The field for the next question, with its documents. */

import { ApiError } from "./api.js";
import { isGone, readFile } from "./documents.js";
import { announce, button, h } from "./dom.js";
import { openFolder, openSource } from "./drawer.js";
import { change, settings } from "./settings.js";
import { collections, nameOf, summary } from "./sources.js";

const PAUSE = 300; // ms without a key, after which the server begins to read ahead

/**
 * @typedef {object} Actions
 * @property {(asked: {question: string, documents: object[], searched: object[], retrieval: boolean}) => void} ask
 * @property {() => void} stop
 * @property {(searched: import("./documents.js").Searched[]) => void} keepSearched  for the chat's next question
 * @property {() => {id: string, text: string}[]} knownDocuments  of the chat so far
 * @property {() => void} openSystem  for the chat's system prompt
 * @property {(draft: {question: string, documents: object[], retrieval: boolean}) => void} readAhead
 * @property {(query: string, documents: object[], signal: AbortSignal, show: (results: object[]) => void) => void} searchAhead
 */

/**
 * A file at the field. It has one of these: what it became, or why it became nothing; none while it is read.
 * @typedef {{name: string, reading?: AbortController, document?: import("./documents.js").Document,
 *   searched?: import("./documents.js").Searched, error?: string}} Attached
 */

/** The field, its documents and its buttons. */
export class Composer {
  /** @param {Actions} actions */
  constructor(actions) {
    this._actions = actions;
    /** @type {Attached[]} */
    this._attached = [];
    this._isWaiting = false; // the question is, for files that are read
    this._running = false;
    this._chips = h("ul.chips", { "aria-label": "Documents of the question" });
    this._note = h("p.note", { role: "status" });
    this._field = h("textarea", { id: "question", rows: "1", placeholder: "Ask a question", "aria-label": "Question",
      oninput: () => this._typed(), onkeydown: (event) => this._pressed(event) });
    this._file = h("input", { type: "file", multiple: true, hidden: true, tabindex: "-1", "aria-hidden": "true",
      onchange: () => this.attach(this._file.files) });
    this._searches = h("input", { type: "checkbox", checked: settings().retrieval,
      onchange: () => change({ retrieval: this._searches.checked }) });
    this._files = button("", openFolder, { class: "plain" });
    this._folder = h("span.folder", { hidden: true }, h("label.switch", {}, this._searches, "Search the folder"), this._files);
    this._system = button("System prompt", () => actions.openSystem(), { class: "plain" });
    this._send = button("Ask", () => this._submit(), { drawing: "send", class: "icon send" });
    this._stop = button("Stop", () => actions.stop(), { drawing: "stop", class: "icon send", hidden: true });
    this.element = h("form.composer", { onsubmit: (event) => event.preventDefault() }, this._chips,
      h("div.field", {}, button("Add documents", () => this._file.click(), { drawing: "clip" }), this._field, this._stop, this._send),
      h("div.under", {}, this._folder, this._note, this._system), this._file);
    this.showFolder();
  }

  /** Put the cursor into the field, with a text if one is given. @param {string} [text] */
  focus(text) {
    if (text !== undefined) {
      this._field.value = text;
      this._typed();
    }
    this._field.focus();
  }

  /** Show whether the chat has a system prompt. @param {boolean} hasOne */
  showSystem(hasOne) {
    this._system.textContent = hasOne ? "System prompt: set" : "System prompt";
  }

  /** Show whether an answer comes. @param {boolean} running */
  showRunning(running) {
    this._running = running;
    this._stop.hidden = !running;
    this._send.hidden = running;
  }

  /** Have files read, one after the other. @param {Iterable<File>} files */
  async attach(files) {
    const added = [...files].map((file) => ({ file, one: { name: file.name, reading: new AbortController() } }));
    this._file.value = "";
    this._attached.push(...added.map(({ one }) => one));
    this._showAttached();
    this._field.focus();
    for (const { file, one } of added) {
      if (this._attached.includes(one)) await this._read(file, one);
    }
  }

  async _read(file, one) {
    announce(`Reading ${one.name}`);
    const known = [...this._actions.knownDocuments(), ...this._documents];
    try {
      Object.assign(one, await readFile(file, known, one.reading.signal));
      this._attached = this._attached.filter((other) => other === one || !isSame(other, one));
    } catch (error) {
      one.error = error instanceof ApiError ? error.message : "The server cannot be reached.";
    }
    one.reading = undefined;
    if (!this._attached.includes(one)) return; // removed meanwhile
    announce(one.error ?? `${one.name} is read`);
    this._attachedChanged();
    if (this._isWaiting && !this._isReading) this._submit();
  }

  /** Show the files of a chat that are searched. @param {import("./documents.js").Searched[]} searched */
  showSearched(searched) {
    const files = searched.map((one) => ({ name: one.name, searched: one }));
    this._attached = [...this._attached.filter((one) => !one.searched), ...files];
    this._showAttached();
    for (const one of searched) isGone(one).then((gone) => gone && this.noteGone([{ ...one, gone }]));
  }

  /** Mark files that the server has forgotten. @param {import("./documents.js").Searched[]} searched */
  noteGone(searched) {
    const lost = new Set(searched.filter(({ gone }) => gone).map(({ id }) => id));
    for (const one of this._attached) if (lost.has(one.searched?.id)) one.searched.gone = true;
    if (lost.size) this._showAttached();
  }

  /** @param {import("./documents.js").Searched[]} searched @returns {import("./documents.js").Searched[]} as they were read last */
  renewed(searched) {
    return searched.map((one) => ({ ...(this._searched.find(({ name }) => name === one.name) ?? one) }));
  }

  get _documents() {
    return this._attached.flatMap(({ document }) => document ?? []);
  }

  get _searched() {
    return this._attached.flatMap(({ searched }) => (searched && !searched.gone ? searched : []));
  }

  get _isReading() {
    return this._attached.some(({ reading }) => reading);
  }

  /** Show the folder's state and its switch, where the server has a folder. */
  showFolder() {
    this._folder.hidden = !collections();
    if (collections()) this._files.textContent = summary();
  }

  get _retrieval() {
    return Boolean(collections()) && settings().retrieval;
  }

  _submit() {
    const question = this._field.value.trim();
    if (this._running || !question) return;
    this._isWaiting = this._isReading;
    if (this._isWaiting) {
      this._note.textContent = "The question is asked once the files are read.";
      return;
    }
    this._forgetPlans();
    const searched = this._searched;
    this._actions.ask({ question, documents: this._documents, searched: this.renewed(searched), retrieval: this._retrieval });
    this._field.value = "";
    this._attached = this._attached.filter((one) => searched.includes(one.searched));
    this._note.textContent = "";
    this._attachedChanged();
    this._fit();
  }

  _pressed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this._submit();
  }

  _typed() {
    this._fit();
    this._plan();
  }

  _fit() {
    this._field.style.height = "auto";
    this._field.style.height = `${Math.min(this._field.scrollHeight, 240)}px`;
  }

  /** After a pause, let the server read what the question will need. */
  _plan() {
    this._forgetPlans();
    const question = this._field.value.trim();
    if (this._running || !(question && this._retrieval)) return;
    this._timer = setTimeout(() => {
      this._search = new AbortController();
      this._actions.searchAhead(question, this._documents, this._search.signal, (results) => this._showFound(results));
    }, PAUSE);
  }

  _forgetPlans() {
    clearTimeout(this._timer);
    this._search?.abort();
  }

  _showFound(results) {
    const titles = results.slice(0, 2).map(nameOf);
    this._note.textContent = titles.length ? `Reading ahead: ${titles.join(", ")}` : "";
  }

  _attachedChanged() {
    this._showAttached();
    this._actions.keepSearched(this._searched);
    if (!this._documents.length) return;
    announce(`${this._documents.length} documents`);
    clearTimeout(this._reading);
    const draft = { question: "?", documents: this._documents, retrieval: this._retrieval }; // only the documents count
    this._reading = setTimeout(() => this._actions.readAhead(draft), PAUSE);
  }

  _showAttached() {
    this._chips.replaceChildren(...this._attached.map((one) => this._chip(one)));
  }

  _chip(one) {
    const { name, document, searched, error } = one;
    const state = error || searched?.gone ? "failed" : document || searched ? "read" : "reading";
    const told = error ?? (searched && (searched.gone ? "no longer on the server: drop it again" : "searched"));
    const shown = document ? button(document.title, () => openSource(document), { class: "plain" }) : h("span.plain", {}, name);
    return h("li.chip", { data: { state }, title: told }, shown, told && h("span.soft", {}, told),
      state === "reading" && h("span.soft.waiting", {}, "being read"),
      button(`Remove ${name}`, () => this._remove(one), { drawing: "close" }));
  }

  _remove(one) {
    one.reading?.abort();
    this._attached = this._attached.filter((other) => other !== one);
    this._attachedChanged();
    this._field.focus();
    if (this._isWaiting && !this._isReading) this._submit();
  }
}

/** Whether a file is there twice: as a document of the same text, or to be searched by the same name. */
function isSame(one, other) {
  const isDocument = one.document && one.document.id === other.document?.id;
  return isDocument || Boolean(one.searched && one.name === other.name && other.searched);
}
