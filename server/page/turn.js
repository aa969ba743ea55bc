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
 * @property {(turn: import("./chat.js").Turn, changed?: {documents: import("./documents.js").Document[]}) => void} again
 * @property {(turn: import("./chat.js").Turn, question: string) => void} edit
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
    this.element = h("article.turn", { "aria-label": "Question and answer" }, this._question, this._thought, this._answer, this._foot);
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
    const chips = documents.map((document) => h("li.chip", {}, button(document.title || document.id, () => openSource(document), { class: "plain" })));
    chips.push(...searched.map(({ name }) => h("li.chip", {}, h("span.plain", {}, name), h("span.soft", {}, "searched"))));
    const tools = h("div.tools", {}, this._branches(), button("Edit the question", () => this._edit(), { drawing: "edit" }));
    fill(this._question, h("h2", {}, question), chips.length > 0 && h("ul.chips", { "aria-label": "Documents" }, chips), tools);
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
    const field = h("textarea", { "aria-label": "Edited question", rows: "2", value: this._turn.question });
    const save = () => field.value.trim() && this._actions.edit(this._turn, field.value.trim());
    const cancel = () => this._showQuestion();
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save();
      }
    });
    this._question.replaceChildren(h("div.editing", {}, field, h("p.soft", {}, "The edited question begins a branch. All that stands before it is still cached."),
      h("div.buttons", {}, button("Ask again", save, { class: "strong" }), button("Cancel", cancel))));
    field.focus();
  }

  /** isDrawn: the answer is on the screen, but for its citations. */
  _showWhole(isDrawn = false) {
    const turn = this._turn;
    const citations = citationsOf(turn.answer, turn.report, (id) => Boolean(documentOf(this._chat, turn, id)));
    if (citations.length || !isDrawn) {
      const describe = (number, citation) => this._describe(number, citation);
      this._answer.replaceChildren(orText(turn.answer, () => renderCited(turn.answer, citations, describe)));
    }
    if (turn.state === "failed") this._answer.append(h("p.notice", { role: "alert" }, turn.error), this._shorter() ?? "");
    if (turn.state === "stopped") this._answer.append(h("p.soft", {}, "Stopped here."));
    if (turn.finish === "length") this._answer.append(h("p.soft", {}, "The answer reached its limit of tokens."));
    fill(this._foot, this._sources(numbered(citations)), this._account(), this._tools());
  }

  /** What helps where a question was too long: to ask it without its largest document. */
  _shorter() {
    const { isTooLong, documents } = this._turn;
    if (!isTooLong) return null;
    const [largest] = [...documents].sort((one, other) => other.text.length - one.text.length);
    if (!largest) return h("p.soft", {}, "Shorten the question, or ask it in a new chat.");
    const without = () => this._actions.again(this._turn, { documents: documents.filter((one) => one !== largest) });
    return h("p", {}, button(`Remove ${largest.title || largest.id} and ask again`, without));
  }

  _describe(number, { id, quoted }) {
    const source = documentOf(this._chat, this._turn, id) ?? { id };
    const words = quoted && this._turn.answer.slice(...quoted);
    return { label: `Source ${number}: ${nameOf(source)}`, open: () => openSource(source, words) };
  }

  /** The documents that the answer cites, and below them those that were read for it, too. */
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
      others.length > 0 && h("div.read", {}, h("span", {}, cited.length ? "Also read" : "Read"),
        h("ul", { "aria-label": "Documents that were read for the answer" }, others)),
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
    return h("div.tools", {}, own, button("Answer again", () => this._actions.again(this._turn), { drawing: "again" }));
  }
}
