/** The view of one chat: its turns, and the field for the next question. */

import { ask, askLost, goOn, isRunning, readAhead, resume, stop } from "./asking.js";
import { addAnswer, addTurn, fieldsToCome, follow, join, newChat, seenTurns, setFields, switchTo, turnsBehind } from "./chat.js";
import { Composer } from "./composer.js";
import { openSystem } from "./dialogs.js";
import { acceptDrops } from "./documents.js";
import { button, h } from "./dom.js";
import { removeDocument, removeTurn } from "./removal.js";
import { settings } from "./settings.js";
import { collections, searchAhead, suggested } from "./sources.js";
import { loadChat, saveChat } from "./store.js";
import { TurnView } from "./turn.js";

const NEAR = 120; // px from the end within which the view follows the answer

/** One chat on the screen. */
export class ChatView {
  /** @param {{changed: (id: string) => void, opened: (id: string) => void}} listeners  changed: what is listed, or found, of a chat */
  constructor(listeners) {
    this._listeners = listeners;
    this._chat = newChat(settings().system);
    this._lost = new Set(); // turns whose questions are asked again once no other page waits for them
    this._open = new Map([[this._chat.id, this._chat]]); // chats with answers on their way stay as they are
    this._turns = h("div.turns");
    this._composer = new Composer({
      ask: (asked) => this._ask(asked),
      stop: () => this.stop(),
      keepSearched: (searched) => this._keepSearched(searched),
      knownDocuments: () => seenTurns(this._chat).flatMap(({ documents }) => documents),
      readAhead: (draft) => readAhead(this._nextChat(), { ...draft, parent: this._chat.head }),
      openSystem: () => openSystem(this._nextChat().system, (system) => this._setSystem(system)),
      searchAhead: (query, documents, signal, show) =>
        searchAhead(query, this._chat.id, fieldsToCome(this._nextChat(), { parent: this._chat.head, documents }), signal, show),
    });
    this._suggested = h("ul.questions", { "aria-label": "Questions to begin with" });
    this._hasFolder = false;
    this._scroller = h("div.scroller", {}, this._turns, this._suggested);
    this._down = button("To the end", () => this._toEnd(), { drawing: "down", class: "icon down", hidden: true });
    this.element = h("section.chat", { "aria-label": "Chat" }, this._scroller, h("div.over", {}, this._down), this._composer.element);
    acceptDrops((files) => this.element.isConnected && this._composer.attach(files));
    this._follow();
  }

  get id() {
    return this._chat.turns.length ? this._chat.id : null;
  }

  /** @returns {string} the place of this chat in the page's addresses */
  get address() {
    return this.id ? `#/chat/${this.id}` : "#/";
  }

  get title() {
    return this.id ? this._chat.title : "";
  }

  /** @param {string} id @returns {Promise<import("./chat.js").Chat|undefined>} a chat as it is here, or as it is kept */
  async chat(id) {
    return this._open.get(id) ?? loadChat(id);
  }

  /** Show a chat. @param {string} [id]  without one, or where it is unknown, a new one */
  async show(id) {
    if (id !== this._chat.id || !id) {
      this._chat = this._open.get(id) ?? (id && (await loadChat(id))) ?? newChat(settings().system);
      this._open.set(this._chat.id, this._chat);
      this._composer.showSearched(this._chat.searched ?? []);
      for (const turn of this._chat.turns) if (turn.mayCome && !turn.removed && !isRunning(turn.id)) resume(this._chat, turn);
      this._takeUp(this._chat);
    }
    this._draw();
    this._toEnd();
    if (matchMedia("(hover: hover)").matches) this._composer.focus();
  }

  /** Take in what another page has saved of a chat. @param {string} id */
  async refresh(id) {
    const chat = this._open.get(id);
    const stored = chat && (await loadChat(id));
    if (!stored) return;
    const before = drawnOf(chat);
    const known = new Set(chat.turns.map((turn) => turn.id));
    join(chat, stored);
    if (!chat.turns.some((turn) => isRunning(turn.id))) follow(chat, stored, known);
    this._takeUp(chat);
    if (chat === this._chat && drawnOf(chat) !== before && !this._turns.querySelector(".editing")) this._draw();
  }

  /** Forget what is open of a chat that was deleted, and end its answers. @param {string} id */
  drop(id) {
    for (const turn of this._open.get(id)?.turns ?? []) stop(turn.id);
    this._open.delete(id);
  }

  /** Show the folder's state. */
  showFolder() {
    this._composer.showFolder();
    const isNew = Boolean(collections()) !== this._hasFolder;
    this._hasFolder = Boolean(collections());
    this._drawSuggested();
    if (isNew && !this._chat.turns.length) this._draw();
  }

  focus() {
    this._composer.focus();
  }

  /** End the answer that comes. */
  stop() {
    for (const turn of seenTurns(this._chat)) stop(turn.id);
  }

  _draw() {
    const turns = seenTurns(this._chat);
    const focused = this._turns.contains(document.activeElement) && document.activeElement;
    this._turns.replaceChildren(...(turns.length ? turns.map((turn) => this._viewOf(turn)) : [this._welcome()]));
    if (focused) this._refocus(focused.closest("[data-turn]")?.dataset.turn, nameOf(focused));
    this._composer.showSystem(Boolean(this._chat.system));
    this._composer.showRunning(turns.some(({ id }) => isRunning(id)));
    this._drawSuggested();
  }

  /** Give the focus back to a button that was drawn anew, or to the field where it is gone. */
  _refocus(turn, name) {
    const all = [...this._turns.querySelectorAll(`[data-turn="${turn}"] button`)];
    const same = all.find((one) => nameOf(one) === name);
    if (same) same.focus();
    else this._composer.focus();
  }

  _toEnd() {
    this._scroller.scrollTop = this._scroller.scrollHeight;
    if (document.activeElement === this._down) this._composer.focus(); // the button goes
  }

  _viewOf(turn) {
    const { question, documents, dropped, retrieval, parent } = turn;
    const chat = this._chat;
    const asked = () => ({ parent, documents, dropped, retrieval, searched: this._composer.renewed(turn.searched ?? []) });
    return new TurnView(this._chat, turn, {
      again: (changed) => this._start({ ...asked(), question, why: "again", ...changed }),
      edit: (edited) => this._start({ ...asked(), question: edited, why: "edit" }),
      editAnswer: (answer) => {
        addAnswer(this._chat, turn, answer);
        this._keep();
        this._refocus(this._chat.head, "Edit the answer");
      },
      goOn: turnsBehind(this._chat, turn).length ? null : () => this._run(turn, goOn),
      lookAgain: () => this._run(turn, resume),
      remove: () => removeTurn(chat, turn, () => this._keep(chat)),
      drop: (document) => removeDocument(chat, turn, document, () => this._keep(chat)),
      switchTo: async (other) => {
        switchTo(this._chat, other);
        this._draw();
        await saveChat(this._chat);
      },
      ended: () => {
        this._composer.noteGone(turn.searched ?? []);
        this._composer.showRunning(seenTurns(this._chat).some(({ id }) => isRunning(id)));
        this._drawSuggested();
        this._listeners.changed(chat.id);
      },
    }).element;
  }

  _keepSearched(searched) {
    this._chat.searched = searched;
    if (this._chat.turns.length) saveChat(this._chat);
  }

  _ask(asked) {
    this._start({ ...asked, parent: this._chat.head });
  }

  /** The chat as its next question finds it: until the first one its system prompt is that of the settings. */
  _nextChat() {
    if (!this._chat.turns.length && !this._chat.changed?.system) this._chat.system = settings().system;
    return this._chat;
  }

  /** The chat of its own system prompt is kept with its first question. */
  _setSystem(system) {
    setFields(this._chat, { system });
    this._composer.showSystem(Boolean(system));
    if (this._chat.turns.length) this._keep();
  }

  /** Keep the chat, and draw it. */
  async _keep(chat = this._chat) {
    if (chat === this._chat) this._draw();
    await saveChat(chat);
    this._listeners.changed(chat.id);
  }

  _start(asked) {
    const chat = this._nextChat();
    const turn = addTurn(chat, asked);
    const done = this._run(turn, ask);
    this._listeners.opened(chat.id);
    return done;
  }

  /** Have an answer come, and show it. */
  _run(turn, begin) {
    const chat = this._chat;
    const done = begin(chat, turn);
    this._draw();
    this._toEnd();
    this._composer.focus();
    this._listeners.changed(chat.id);
    return done;
  }

  /** See to the answers of a chat that no page waits for any more. */
  _takeUp(chat) {
    for (const turn of chat.turns.filter(({ id, removed }) => !isRunning(id) && !removed)) {
      if (turn.state === "running" && turn.finish) turn.state = "done"; // it was to go on, and had not begun to
      else if (turn.state === "running" && turn.answerId) resume(chat, turn);
      else if (turn.state === "running" && !this._lost.has(turn.id)) {
        this._lost.add(turn.id);
        askLost(chat, turn, () => {
          this._lost.delete(turn.id);
          if (chat === this._chat) this._draw();
        });
      }
    }
  }

  _welcome() {
    const folder = collections();
    return h("div.welcome", {},
      h("h2", {}, folder ? "Ask your folder." : "Ask, and bring documents."),
      h("p", {}, folder
        ? "Answers come from the files of this server’s folder, and say where they stand."
        : "Drop files anywhere on this page: they are read once, and stay read for every later question."),
      h("p.soft", {}, "Under each answer a bar shows what of the prompt was cached, and what was computed."));
  }

  /** Offer the folder's questions that this chat has not asked yet. */
  _drawSuggested() {
    const turns = seenTurns(this._chat);
    const asked = new Set(turns.map(({ question }) => question));
    const isBusy = turns.some(({ id }) => isRunning(id));
    const left = suggested().filter((question) => !asked.has(question));
    const begins = (question) => button(question, () => this._ask({ question, documents: [], retrieval: true }));
    this._suggested.hidden = isBusy || !left.length || !turns.every(({ question }) => suggested().includes(question));
    if (left.join() === this._offered) return; // else a reader on one of them loses the focus
    this._offered = left.join();
    this._suggested.replaceChildren(...left.map((question) => h("li", {}, begins(question))));
  }

  /** Keep the end in sight while it grows, unless the reader has scrolled away. */
  _follow() {
    let isNear = true;
    const { _scroller: scroller } = this;
    const look = () => {
      isNear = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
      this._down.hidden = isNear;
    };
    scroller.addEventListener("scroll", look, { passive: true });
    new ResizeObserver(() => {
      if (isNear) scroller.scrollTop = scroller.scrollHeight;
      else look();
    }).observe(this._turns);
  }
}

const nameOf = (element) => element.getAttribute("aria-label") ?? element.textContent;

/** What of a chat is drawn anew where it changes. */
function drawnOf(chat) {
  return JSON.stringify([chat.turns.length, Boolean(chat.system), seenTurns(chat).map(({ id, state, changed }) => [id, state, changed, isRunning(id)])]);
}
