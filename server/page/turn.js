/** One turn on the page: its question, its answer as it comes, and the account of what it cost. */

import { attach, isRunning } from "./asking.js";
import { account, progressBar } from "./bar.js";
import { documentOf, siblings, turnsBefore } from "./chat.js";
import { citationsOf, numbered, renderCited } from "./citations.js";
import { copy } from "./clipboard.js";
import { announce, button, fill, h } from "./dom.js";
import { openSource } from "./drawer.js";
import { segmentRows } from "./known.js";
import { MarkdownStream, orText } from "./markdown.js";
import { missing, nameOf, placeText } from "./sources.js";

/**
 * @typedef {object} Actions
 * @property {(changed?: Partial<Pick<import("./chat.js").Turn, "documents"|"dropped">>) => void} again
 * @property {(question: string) => void} edit
 * @property {(answer: string) => void} editAnswer
 * @property {(() => void)|null} goOn  with an answer that was cut; null: other turns stand behind it
 * @property {() => void} lookAgain  for an answer that the server may have
 * @property {() => void} remove
 * @property {(document: import("./chat.js").Document) => void} drop
 * @property {(turn: import("./chat.js").Turn) => void} switchTo
 * @property {() => void} ended
 */

/** A turn on the screen; it follows an answer that comes. */
export class TurnView {
  /**
   * @param {import("./chat.js").Chat} chat
   * @param {import("./chat.js").Turn} turn
   * @param {Actions} actions
   */
  constructor(chat, turn, actions) {
    this._chat = chat;
    this._turn = turn;
    this._actions = actions;
    this._question = h("div.question");
    this._thought = h("details.thought", { hidden: !turn.thought }, h("summary", {}, "Thoughts"), h("div.text", {}, turn.thought));
    this._answer = h("div.answer");
    this._foot = h("footer");
    this.element = h("article.turn", { "aria-label": "Question and answer", data: { turn: turn.id } }, this._question, this._thought, this._answer, this._foot);
    this._showQuestion();
    if (isRunning(turn.id)) this._follow();
    else this._showWhole();
  }

  progress() {
    if (!this._turn.answer) this._foot.replaceChildren(progressBar(this._turn.progress));
  }

  text(piece) {
    if (!this._stream.text) this._foot.replaceChildren();
    this._stream.push(piece);
  }

  thought(piece) {
    this._thought.hidden = false;
    this._thought.lastChild.append(piece);
  }

  wait(why) {
    if (this._foot.textContent !== why) this._foot.replaceChildren(h("p.waiting", {}, why));
  }

  whole() {
    this._isFetched = true;
    this._thought.hidden = !this._turn.thought;
    this._thought.lastChild.textContent = this._turn.thought;
  }

  end() {
    this._stream.finish();
    this._showWhole(!this._isFetched);
    if (this._turn.documents.length) this._showQuestion(); // they can be removed now
    for (const one of this._question.querySelectorAll("[data-file]")) one.textContent = this._searchedBy(one.dataset.file);
    this._answer.removeAttribute("aria-busy");
    announce({ done: "The answer is complete.", stopped: "Stopped.", failed: "The answer failed." }[this._turn.state]);
    this._actions.ended();
  }

  _follow() {
    this._stream = new MarkdownStream(this._answer);
    this._answer.setAttribute("aria-busy", "true");
    if (this._turn.answer) this._stream.push(this._turn.answer);
    else if (this._turn.progress) this.progress();
    else this._foot.replaceChildren(h("p.waiting", {}, "Waiting for the server"));
    attach(this._turn.id, this);
  }

  _showQuestion() {
    const { question, documents, searched = [] } = this._turn;
    const chips = documents.map((document) => this._chip(document));
    chips.push(...searched.map(({ id, name }) => h("li.chip", {}, h("span.plain", {}, name), h("span.soft", { data: { file: id } }, this._searchedBy(id)))));
    const tools = h("div.tools", {}, this._branches(), button("Edit the question", () => this._edit(), { drawing: "edit" }));
    fill(this._question, h("h2", {}, question), chips.length > 0 && h("ul.chips", { "aria-label": "Documents" }, chips), tools);
  }

  /** By what a file was searched for this answer, once that is known. */
  _searchedBy(id) {
    const stage = this._turn.report?.files?.find((one) => one.id === id)?.stage;
    return stage ? `searched by words${stage === "fused" ? " and vectors" : ""}` : "searched";
  }

  _chip(document) {
    const name = document.title || document.id;
    const remove = this._turn.state !== "running" && button(`Remove ${name} from the chat`, () => this._actions.drop(document), { drawing: "close" });
    return h("li.chip", {}, button(name, () => openSource(document), { class: "plain" }), remove);
  }

  /** A switch between the turns in this place, where there are several. */
  _branches() {
    const all = siblings(this._chat, this._turn);
    if (all.length < 2) return null;
    const at = all.indexOf(this._turn);
    const to = (place, label, drawing) => button(label, () => this._actions.switchTo(all[place]), { drawing, disabled: !all[place] });
    return h("span.branches", {}, to(at - 1, "Earlier version", "back"), h("span", {}, `${at + 1} / ${all.length}`), to(at + 1, "Later version", "forth"));
  }

  _edit() {
    const note = "The edited question begins a branch. All that stands before it is still cached.";
    const cancel = () => {
      this._showQuestion();
      this._question.querySelector("[aria-label='Edit the question']").focus();
    };
    edit(this._question, { label: "Edited question", text: this._turn.question, act: "Ask again", note, save: (text) => this._actions.edit(text), cancel });
  }

  _editAnswer() {
    const note = "The edited answer begins a branch. The next question goes on from it.";
    const cancel = () => {
      this._showWhole();
      this._foot.querySelector("[aria-label='Edit the answer']").focus();
    };
    fill(this._foot);
    edit(this._answer, { label: "Edited answer", text: this._turn.answer, act: "Keep", note, isLong: true, save: (text) => this._actions.editAnswer(text), cancel });
  }

  /** isDrawn: the answer is on the screen, but for its citations. */
  _showWhole(isDrawn = false) {
    const turn = this._turn;
    const citations = citationsOf(turn.answer, turn.report, (id) => Boolean(documentOf(this._chat, turn, id)));
    if (citations.length || !isDrawn) {
      const describe = (number, citation) => this._describe(number, citation);
      this._answer.replaceChildren(orText(turn.answer, () => renderCited(turn.answer, citations, describe)));
    }
    this._answer.append(...this._endOf(turn).filter(Boolean));
    fill(this._foot, this._sources(numbered(citations)), this._account(), this._tools());
  }

  /** How an answer has ended, where it is not whole, and what can be done. */
  _endOf({ state, error, finish, mayCome }) {
    const { goOn, lookAgain } = this._actions;
    return [
      error && h("p.notice", { role: "alert" }, error),
      this._shorter(),
      mayCome && h("p", {}, button("Look again", lookAgain)),
      state === "stopped" && h("p.soft", {}, "Stopped here."),
      state === "running" && h("p.waiting", {}, "Another page waits for this answer"),
      finish === "length" && h("p.soft", {}, "The answer reached its limit of tokens. ", goOn && button("Continue", goOn, { class: "plain" })),
    ];
  }

  /** What helps where a question was too long: to ask it without its largest document. */
  _shorter() {
    const { isTooLong, documents, dropped = [] } = this._turn;
    if (!isTooLong) return null;
    const [largest] = [...documents].sort((one, other) => other.text.length - one.text.length);
    if (!largest) return h("p.soft", {}, "Shorten the question, or ask it in a new chat.");
    const without = () => this._actions.again({ documents: documents.filter((one) => one !== largest), dropped: [...dropped, largest.id] });
    return h("p", {}, button(`Remove ${largest.title || largest.id} and ask again`, without));
  }

  _describe(number, { id, quoted }) {
    const source = documentOf(this._chat, this._turn, id) ?? { id };
    const words = quoted && this._turn.answer.slice(...quoted);
    return { label: `Source ${number}: ${nameOf(source)}`, open: () => openSource(source, words) };
  }

  /** The documents that the answer cites, and below them the others that were retrieved. */
  _sources(cited) {
    const found = (this._turn.report?.retrieved ?? []).map(({ id }) => id).filter((id) => !cited.includes(id));
    const link = (source) => button(nameOf(source), () => openSource(source), { class: "plain" });
    const sourceOf = (id) => documentOf(this._chat, this._turn, id) ?? { id };
    const item = (source, at) => h("li", {}, h("span.number", { "aria-hidden": "true" }, `${at + 1}`), link(source),
      source.path && source.title ? h("span.soft", {}, placeText(source)) : null);
    const unread = missing(this._turn.report?.index);
    const note = unread && h("p.soft", {}, unread);
    if (this._turn.report?.retrieved?.length === 0 && !cited.length) {
      return [h("p.soft", {}, `Nothing in the ${this._turn.searched?.length ? "files" : "folder"} matches the question.`), note];
    }
    const others = found.map((id) => h("li", { title: sourceOf(id).path ?? false }, link(sourceOf(id))));
    return [
      note,
      cited.length > 0 && h("ol.sources", { "aria-label": "Sources" }, cited.map((id, at) => item(sourceOf(id), at))),
      others.length > 0 && h("div.read", {}, h("span", {}, cited.length ? "Also retrieved" : "Retrieved"),
        h("ul", { "aria-label": "Documents that were retrieved for the answer" }, others)),
    ];
  }

  _account() {
    const turn = this._turn;
    if (!turn.report?.segments) return null;
    const titleOf = (id) => nameOf(documentOf(this._chat, turn, id) ?? { id });
    const names = segmentRows(this._chat, turn).map(({ name }) => name);
    return account(turn, { titleOf, names, isFirst: !turnsBefore(this._chat, turn).length });
  }

  _tools() {
    const own = button("Copy the answer", () => copy(this._turn.answer, own), { drawing: "copy" });
    return h("div.tools", {}, own, button("Answer again", () => this._actions.again(), { drawing: "again" }),
      button("Edit the answer", () => this._editAnswer(), { drawing: "edit" }),
      this._turn.state !== "running" && button("Remove from the chat", () => this._actions.remove(), { drawing: "bin" }));
  }
}

/** Put a field in place of a text. isLong: Enter begins a new line, and Ctrl + Enter keeps the text. */
function edit(element, { label, text, act, note, isLong = false, save, cancel }) {
  const field = h("textarea", { "aria-label": label, rows: isLong ? "12" : "2", value: text });
  const keep = () => field.value.trim() && save(field.value.trim());
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") {
      event.stopPropagation(); // it would end an answer that comes
      cancel();
    } else if (event.key === "Enter" && (isLong ? event.ctrlKey || event.metaKey : !event.shiftKey)) {
      event.preventDefault();
      keep();
    }
  });
  fill(element, h("div.editing", {}, field, h("p.soft", {}, note), h("div.buttons", {}, button(act, keep, { class: "strong" }), button("Cancel", cancel))));
  field.focus();
}
