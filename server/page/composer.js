/** The field for the next question, with its documents. */

import { readFiles } from "./documents.js";
import { announce, button, h } from "./dom.js";
import { openFolder, openSource } from "./drawer.js";
import { change, settings } from "./settings.js";
import { collections, summary } from "./sources.js";

const PAUSE = 300; // ms without a key, after which the server begins to read ahead

/**
 * @typedef {object} Actions
 * @property {(asked: {question: string, documents: object[], retrieval: boolean}) => void} ask
 * @property {() => void} stop
 * @property {() => {id: string, text: string}[]} knownDocuments  of the chat so far
 * @property {(draft: {question: string, documents: object[], retrieval: boolean}) => void} readAhead
 * @property {(query: string, documents: object[], signal: AbortSignal, show: (results: object[]) => void) => void} searchAhead
 */

/** The field, its documents and its buttons. */
export class Composer {
  /** @param {Actions} actions */
  constructor(actions) {
    this._actions = actions;
    this._documents = [];
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
    this._send = button("Ask", () => this._submit(), { drawing: "send", class: "icon send" });
    this._stop = button("Stop", () => actions.stop(), { drawing: "stop", class: "icon send", hidden: true });
    this.element = h("form.composer", { onsubmit: (event) => event.preventDefault() }, this._chips,
      h("div.field", {}, button("Add documents", () => this._file.click(), { drawing: "clip" }), this._field, this._stop, this._send),
      h("div.under", {}, this._folder, this._note), this._file);
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

  /** Show whether an answer comes. @param {boolean} running */
  showRunning(running) {
    this._running = running;
    this._stop.hidden = !running;
    this._send.hidden = running;
  }

  /** Add files as documents. @param {Iterable<File>} files */
  async attach(files) {
    const known = [...this._actions.knownDocuments(), ...this._documents];
    const { documents, refused } = await readFiles(files, known);
    const ids = new Set(this._documents.map(({ id }) => id));
    this._documents.push(...documents.filter(({ id }) => !ids.has(id)));
    this._file.value = "";
    this._note.textContent = refused.join(" ");
    this._showDocuments();
    this._field.focus();
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
    this._forgetPlans();
    this._actions.ask({ question, documents: this._documents, retrieval: this._retrieval });
    this._field.value = "";
    this._documents = [];
    this._note.textContent = "";
    this._showDocuments();
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
    const titles = results.slice(0, 2).map(({ title, id }) => title || id);
    this._note.textContent = titles.length ? `Reading ahead: ${titles.join(", ")}` : "";
  }

  _showDocuments() {
    const chip = (document) => h("li.chip", {}, button(document.title, () => openSource(document), { class: "plain" }),
      button(`Remove ${document.title}`, () => this._remove(document), { drawing: "close" }));
    this._chips.replaceChildren(...this._documents.map(chip));
    if (!this._documents.length) return;
    announce(`${this._documents.length} documents`);
    clearTimeout(this._reading);
    const draft = { question: "?", documents: this._documents, retrieval: this._retrieval }; // only the documents count
    this._reading = setTimeout(() => this._actions.readAhead(draft), PAUSE);
  }

  _remove(document) {
    this._documents = this._documents.filter((other) => other !== document);
    this._showDocuments();
    this._field.focus();
  }
}
