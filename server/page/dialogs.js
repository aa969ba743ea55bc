/** The two dialogs: the server's key, and the reader's settings. */

import { storeKey, storedKey } from "./api.js";
import { button, h } from "./dom.js";
import { change, settings } from "./settings.js";

let asking = null;

/**
 * Ask for the key of the server. Several calls at once ask once.
 * @returns {Promise<string|null>} null: the reader gave none
 */
export function askForKey() {
  asking ??= new Promise((resolve) => {
    const field = h("input", { type: "password", id: "key", autocomplete: "off", required: true, spellcheck: "false" });
    const wrong = storedKey() ? h("p.notice", {}, "The server does not take this key.") : null;
    const form = h("form", { method: "dialog" }, h("h2", {}, "This server wants a key"), wrong,
      h("label", { for: "key" }, "API key"), field, h("p.soft", {}, "It is kept in this browser until you remove it in the settings. Without it you can read your chats, and ask nothing."),
      h("div.buttons", {}, h("button.strong", { value: "ok" }, "Use it"), h("button", { value: "", formnovalidate: true }, "Cancel")));
    const dialog = open(form, "key");
    dialog.addEventListener("close", () => {
      asking = null;
      const key = dialog.returnValue ? field.value.trim() : null;
      if (key) storeKey(key);
      resolve(key || null);
    });
    field.focus();
  });
  return asking;
}

const FIELDS = [
  ["system", "System prompt of new chats", () => h("textarea", { rows: "3" })],
  ["temperature", "Temperature", () => h("input", { type: "number", min: "0", max: "5", step: "0.1", placeholder: "as the server has it" })],
  ["maxTokens", "Most tokens of an answer", () => h("input", { type: "number", min: "1", step: "1", placeholder: "no limit" })],
  ["scope", "Cache scope", () => h("input", { type: "text", maxlength: "256", placeholder: "the common one" })],
  ["theme", "Light or dark", () => h("select", {}, ["auto", "light", "dark"].map((name) => h("option", { value: name }, name)))],
];
const KEYS = [["Enter", "ask"], ["Shift + Enter", "a new line"], ["/", "to the question"], ["Esc", "stop, close"], ["Ctrl + Shift + O", "new chat"]];

/** Show the settings. @param {() => void} removeChats @param {() => void} closed */
export function openSettings(removeChats, closed) {
  const rows = FIELDS.map(([name, label, make]) => {
    const field = make();
    field.id = `setting-${name}`;
    field.value = settings()[name];
    field.addEventListener("change", () => change({ [name]: field.value }));
    return h("div.row", {}, h("label", { for: field.id }, label), field);
  });
  const key = storedKey() ? button("Remove the API key", (event) => {
    storeKey("");
    event.target.remove();
  }) : null;
  const all = button("Delete all chats", (event) => {
    if (event.target.dataset.sure) {
      removeChats();
      dialog.close();
    }
    event.target.dataset.sure = "yes";
    event.target.textContent = "Delete them all, here and on the server?";
  });
  const keys = h("dl.keys", {}, KEYS.map(([name, act]) => [h("dt", {}, h("kbd", {}, name)), h("dd", {}, act)]));
  const dialog = open(h("form", { method: "dialog" }, h("h2", {}, "Settings"), rows, keys,
    h("div.buttons", {}, key, all, h("button.strong", {}, "Done"))), "settings");
  dialog.addEventListener("close", closed);
}

function open(content, name) {
  const dialog = h("dialog", { data: { name }, "aria-label": content.querySelector("h2").textContent }, content);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
