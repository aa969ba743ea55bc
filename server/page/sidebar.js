/** The list of chats. */

import { button, h } from "./dom.js";

const DAY = 86_400_000;

/** The chats by their days. */
export class Sidebar {
  /**
   * @param {HTMLElement} element
   * @param {{remove: (chat: {id: string, title: string}) => void, close: () => void}} actions
   */
  constructor(element, actions) {
    this._actions = actions;
    this._list = h("div.list");
    element.append(h("a.new", { href: "#/", onclick: () => actions.close() }, "New chat"), this._list);
  }

  /**
   * @param {{id: string, title: string, updated: number}[]} chats  the newest first
   * @param {string|null} current
   */
  show(chats, current) {
    this._list.replaceChildren(...[...grouped(chats)].map(([day, members]) =>
      h("section", {}, h("h2", {}, day), h("ul", {}, members.map((chat) => this._row(chat, chat.id === current))))));
    if (!chats.length) this._list.append(h("p.soft", {}, "Chats are kept in this browser."));
  }

  _row({ id, title }, isCurrent) {
    const link = h("a", { href: `#/chat/${id}`, "aria-current": isCurrent && "page", onclick: () => this._actions.close() }, title);
    return h("li", {}, link, button(`Delete ${title}`, () => this._actions.remove({ id, title }), { drawing: "bin" }));
  }
}

function grouped(chats) {
  const groups = new Map();
  for (const chat of chats) groups.set(dayOf(chat.updated), [...(groups.get(dayOf(chat.updated)) ?? []), chat]);
  return groups;
}

function dayOf(time) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / DAY);
  if (days < 2) return days < 1 ? "Today" : "Yesterday";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}
