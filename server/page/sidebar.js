/** The list of chats: their search, and what can be done with each. */

import { announce, button, fill, h } from "./dom.js";
import { ChatSearch } from "./search.js";

const DAY = 86_400_000;
const MOST = 100; // chats that a search shows

/**
 * @typedef {import("./store.js").Head} Head
 *
 * @typedef {object} Actions
 * @property {(chat: Head) => void} remove
 * @property {(chat: Head, fields: {title?: string, pinned?: boolean}) => Promise<void>} set
 * @property {(chat: Head, kind: "json"|"markdown") => void} save
 * @property {() => void} close
 */

/** The chats by their days, the pinned ones in front; or those that a search has found. */
export class Sidebar {
  /** @param {HTMLElement} element @param {Actions} actions */
  constructor(element, actions) {
    this._actions = actions;
    this._search = new ChatSearch();
    this._chats = [];
    this._current = null;
    this._answering = new Set();
    this._opened = ""; // the chat whose acts are shown
    this._field = h("input.search", { type: "search", placeholder: "Search chats", "aria-label": "Search chats", autocomplete: "off",
      oninput: () => this._searchAnew(), onkeydown: (event) => this._pressed(event) });
    this._list = h("div.list");
    element.append(h("a.new", { href: "#/", onclick: () => actions.close() }, "New chat"), this._field, this._list);
  }

  /** Put the cursor into the search. */
  focus() {
    this._field.focus();
    this._field.select();
  }

  /** Read a chat anew before the next search. @param {string} id */
  changed(id) {
    this._search.forget(id);
  }

  /** @param {Head[]} chats  in their order @param {string|null} current @param {Set<string>} answering  chats by id */
  show(chats, current, answering) {
    if (current) this.changed(current);
    this._chats = chats;
    this._current = current;
    this._answering = answering;
    return this._draw();
  }

  async _draw() {
    const query = this._field.value.trim();
    const found = query ? await this._search.find(query) : null;
    if (this._field.value.trim() !== query) return; // another search was begun meanwhile
    if (this._list.querySelector(".renaming")) return; // what is typed there stays
    const focused = this._list.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    const at = this._rowKeys().indexOf(focused?.split(" ")[0]);
    fill(this._list, found ? this._found(found, query) : this._groups());
    if (focused) this._refocus(focused, at);
  }

  _rowKeys() {
    return [...this._list.querySelectorAll("li[data-chat]")].map((row) => row.dataset.chat);
  }

  /** Give the focus back to what had it; where its chat is gone, to the one in its place. */
  _refocus(key, at) {
    const keys = this._rowKeys();
    const next = keys[Math.min(at, keys.length - 1)];
    const same = this._list.querySelector(`[data-key="${key}"]`) ?? this._list.querySelector(`[data-key="${key.split(" ")[0]} acts"]`);
    (same ?? this._list.querySelector(`[data-key="${next} acts"]`) ?? this._field).focus();
  }

  _groups() {
    if (!this._chats.length) return h("p.soft", {}, "Chats are kept in this browser.");
    return [...grouped(this._chats)].map(([day, members]) =>
      h("section", {}, h("h2", {}, day), h("ul", {}, members.map((chat) => this._row(chat)))));
  }

  _found(chats, query) {
    const told = chats.length ? `${chats.length} ${chats.length === 1 ? "chat has" : "chats have"} “${query}”` : `No chat has “${query}”`;
    announce(told);
    const rest = chats.length > MOST && h("p.soft", {}, `The first ${MOST} are shown.`);
    return h("section", {}, h("h2", {}, told), rest, h("ul", {}, chats.slice(0, MOST).map((chat) => this._row(chat, chat.excerpt))));
  }

  _row(chat, excerpt) {
    const { id, title, pinned } = chat;
    const isOpen = this._opened === id;
    const isAnswering = this._answering.has(id);
    const link = h("a", { href: `#/chat/${id}`, "aria-current": id === this._current && "page", class: isAnswering && "answering",
      title: isAnswering && "An answer is on its way", data: { key: `${id} link` }, onclick: () => this._actions.close() },
      title, excerpt && h("span.excerpt", {}, excerpt[0], h("mark", {}, excerpt[1]), excerpt[2]));
    const more = button(`Actions for ${title}`, () => this._toggle(id), { drawing: "more", "aria-expanded": String(isOpen), data: { key: `${id} acts` } });
    const row = h("li", { data: { chat: id }, onkeydown: (event) => isOpen && this._close(event, id) }, link, more);
    const act = (label, name, run) => h("li", {}, button(label, run, { class: "act", data: { key: `${id} ${name}` } }));
    if (isOpen) {
      row.append(h("ul.acts", { "aria-label": `Actions for ${title}` },
        act("Rename", "rename", () => this._rename(row, chat)),
        act(pinned ? "Unpin" : "Pin", "pin", () => this._actions.set(chat, { pinned: !pinned })),
        act("Save as Markdown", "markdown", () => this._actions.save(chat, "markdown")),
        act("Save as JSON", "json", () => this._actions.save(chat, "json")),
        act("Delete", "delete", () => this._actions.remove(chat))));
    }
    return row;
  }

  async _toggle(id) {
    this._opened = this._opened === id ? "" : id;
    await this._draw();
  }

  async _close(event, id) {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    await this._toggle(id);
    this._list.querySelector(`[data-key="${id} acts"]`)?.focus();
  }

  _rename(row, chat) {
    const field = h("input", { value: chat.title, maxlength: "200", "aria-label": `New name of ${chat.title}` });
    const end = async (title) => {
      row.classList.remove("renaming");
      this._opened = "";
      if (title && title !== chat.title) await this._actions.set(chat, { title });
      else await this._draw();
      this._list.querySelector(`[data-key="${chat.id} acts"]`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.stopPropagation();
      end(event.key === "Enter" ? field.value.trim() : "");
    });
    const buttons = h("div.buttons", {}, button("Rename", () => end(field.value.trim()), { class: "strong" }), button("Cancel", () => end("")));
    row.classList.add("renaming");
    fill(row, field, buttons);
    field.focus();
    field.select();
  }

  _pressed(event) {
    if (event.key !== "Escape" || !this._field.value) return;
    event.stopPropagation();
    this._field.value = "";
    this._searchAnew();
  }

  /** Show what is searched now; a name that was being typed is left. */
  _searchAnew() {
    this._list.querySelector(".renaming")?.classList.remove("renaming");
    this._draw();
  }
}

function grouped(chats) {
  const groups = new Map();
  for (const chat of chats) {
    const name = chat.pinned ? "Pinned" : dayOf(chat.updated);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(chat);
  }
  return groups;
}

function dayOf(time) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / DAY);
  if (days < 2) return days < 1 ? "Today" : "Yesterday";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}
