/** The view of one chat: its turns, and the field for the next question. */

import { ask, isRunning, readAhead, resume, stop } from "./asking.js";
import { addTurn, fieldsToCome, follow, join, newChat, seenTurns, switchTo } from "./chat.js";
import { Composer } from "./composer.js";
import { acceptDrops } from "./documents.js";
import { button, h } from "./dom.js";
import { settings } from "./settings.js";
import { collections, searchAhead, suggested } from "./sources.js";
import { loadChat, saveChat } from "./store.js";
import { TurnView } from "./turn.js";

const NEAR = 120; // px from the end within which the view follows the answer

/** One chat on the screen. */
export class ChatView {
  /** @param {{changed: () => void, opened: (id: string) => void}} listeners */
  constructor(listeners) {
    this._listeners = listeners;
    this._chat = newChat(settings().system);
    this._open = new Map([[this._chat.id, this._chat]]); // chats with answers on their way stay as they are
    this._turns = h("div.turns");
    this._composer = new Composer({
      ask: (asked) => this._ask(asked),
      stop: () => this.stop(),
      keepSearched: (searched) => this._keepSearched(searched),
      knownDocuments: () => seenTurns(this._chat).flatMap(({ documents }) => documents),
      readAhead: (draft) => readAhead(this._nextChat(), { ...draft, parent: this._chat.head }),
      searchAhead: (query, documents, signal, show) =>
        searchAhead(query, this._chat.id, fieldsToCome(this._nextChat(), { parent: this._chat.head, documents }), signal, show),
    });
    this._suggested = h("ul.questions", { "aria-label": "Questions to begin with" });
    this._hasFolder = false;
    this._scroller = h("div.scroller", {}, this._turns, this._suggested);
    this.element = h("section.chat", { "aria-label": "Chat" }, this._scroller, this._composer.element);
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

  /** Show a chat. @param {string} [id]  without one, or where it is unknown, a new one */
  async show(id) {
    if (id !== this._chat.id || !id) {
      this._chat = this._open.get(id) ?? (id && (await loadChat(id))) ?? newChat(settings().system);
      this._open.set(this._chat.id, this._chat);
      this._composer.showSearched(this._chat.searched ?? []);
      resumeIn(this._chat);
      for (const turn of this._chat.turns) if (turn.state === "running" && !isRunning(turn.id)) turn.state = "stopped";
    }
    this._draw();
    this._scroller.scrollTop = this._scroller.scrollHeight;
    if (matchMedia("(hover: hover)").matches) this._composer.focus();
  }

  /** Take in what another page has saved of a chat. @param {string} id */
  async refresh(id) {
    const chat = this._open.get(id);
    const stored = chat && (await loadChat(id));
    if (!stored) return;
    const before = drawnOf(chat);
    join(chat, stored);
    if (!chat.turns.some((turn) => isRunning(turn.id))) follow(chat, stored);
    resumeIn(chat);
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
    this._turns.replaceChildren(...(turns.length ? turns.map((turn) => this._viewOf(turn)) : [this._welcome()]));
    this._composer.showRunning(turns.some(({ id }) => isRunning(id)));
    this._drawSuggested();
  }

  _viewOf(turn) {
    const { question, documents, retrieval, parent } = turn;
    const asked = () => ({ parent, documents, retrieval, searched: this._composer.renewed(turn.searched ?? []) });
    return new TurnView(this._chat, turn, {
      again: (_, changed) => this._start({ ...asked(), question, why: "again", ...changed }),
      edit: (_, edited) => this._start({ ...asked(), question: edited, why: "edit" }),
      switchTo: async (other) => {
        switchTo(this._chat, other);
        this._draw();
        await saveChat(this._chat);
      },
      ended: () => {
        this._composer.noteGone(turn.searched ?? []);
        this._composer.showRunning(seenTurns(this._chat).some(({ id }) => isRunning(id)));
        this._drawSuggested();
        this._listeners.changed();
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

  /** The chat as its next question finds it: until the first one its system prompt may change. */
  _nextChat() {
    if (!this._chat.turns.length) this._chat.system = settings().system;
    return this._chat;
  }

  _start(asked) {
    const chat = this._nextChat();
    const done = ask(chat, addTurn(chat, asked));
    this._draw();
    this._scroller.scrollTop = this._scroller.scrollHeight;
    this._composer.focus();
    this._listeners.opened(chat.id);
    this._listeners.changed();
    return done;
  }

  _welcome() {
    const folder = collections();
    return h("div.welcome", {},
      h("h2", {}, folder ? "Ask your folder." : "Ask, and bring documents."),
      h("p", {}, folder
        ? "Answers come from the files of this server’s folder, and say where they stand."
        : "Drop files anywhere on this page: they are read once, and stay read for every later question."),
      h("p.soft", {}, "Under each answer a bar shows what was reused from the cache, and what had to be computed."));
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
    scroller.addEventListener("scroll", () => {
      isNear = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
    }, { passive: true });
    new ResizeObserver(() => {
      if (isNear) scroller.scrollTop = scroller.scrollHeight;
    }).observe(this._turns);
  }
}

/** Fetch the answers of a chat that the server finishes. */
function resumeIn(chat) {
  for (const turn of chat.turns) if (turn.state === "running" && turn.answerId && !isRunning(turn.id)) resume(chat, turn);
}

/** What of a chat a change of draws anew. */
function drawnOf(chat) {
  return JSON.stringify([chat.turns.length, seenTurns(chat).map(({ id, state }) => [id, state, isRunning(id)])]);
}
