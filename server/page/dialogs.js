/** The dialogs: the server's key, the reader's settings, and the system prompt of a chat. */

import { storeKey, storedKey } from "./api.js";
import { button, h } from "./dom.js";
import { change, settings } from "./settings.js";
import { ImportError, allChats, importChats, save } from "./transfer.js";

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
const KEYS = [["Enter", "ask"], ["Shift + Enter", "a new line"], ["/", "to the question"], ["Esc", "stop, close"],
  ["Ctrl + Enter", "keep an edited answer"], ["Ctrl + K", "search the chats"], ["Ctrl + Shift + O", "new chat"]];

/**
 * Show the settings.
 * @param {{removeChats: () => void, imported: (chats: import("./chat.js").Chat[]) => void, closed: () => void}} actions
 */
export function openSettings({ removeChats, imported, closed }) {
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
  const took = (chats) => {
    dialog.close();
    imported(chats);
  };
  const dialog = open(h("form", { method: "dialog" }, h("h2", {}, "Settings"), rows, keys, transfer(took),
    h("div.buttons", {}, key, all, h("button.strong", {}, "Done"))), "settings");
  dialog.addEventListener("close", closed);
}

/** The buttons that save all chats in a file, and bring chats of a file back. */
function transfer(imported) {
  const problem = h("p.notice", { role: "alert" });
  const bring = async ([file]) => {
    problem.textContent = "";
    if (!file) return;
    try {
      imported(await importChats(file));
    } catch (error) {
      problem.textContent = error instanceof ImportError ? error.message : `The chats cannot be kept: ${error.message}`;
    }
  };
  const field = h("input", { type: "file", accept: ".json,application/json", hidden: true, tabindex: "-1", "aria-hidden": "true", class: "import" });
  field.addEventListener("change", () => bring(field.files).finally(() => (field.value = "")));
  const all = async () => save(await allChats(), "chats.json");
  return h("div", {}, h("div.buttons", {}, button("Save all chats", all), button("Import chats", () => field.click()), field), problem);
}

/** Show the system prompt of a chat. @param {string} system @param {(system: string) => void} set */
export function openSystem(system, set) {
  const field = h("textarea", { id: "system", rows: "5", value: system });
  const form = h("form", { method: "dialog" }, h("h2", {}, "System prompt"), h("label", { for: "system" }, "What the model is told in front of this chat"), field,
    h("p.soft", {}, "A chat that goes on with another one is read anew."),
    h("div.buttons", {}, h("button.strong", { value: "ok" }, "Use it"), h("button", { value: "" }, "Cancel")));
  const dialog = open(form, "system");
  dialog.addEventListener("close", () => dialog.returnValue && field.value !== system && set(field.value));
  field.focus();
}

function open(content, name) {
  const dialog = h("dialog", { data: { name }, "aria-label": content.querySelector("h2").textContent }, content);
  const opener = document.activeElement;
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (document.activeElement === document.body) opener?.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
