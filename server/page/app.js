/** The page: which view is shown, and what the reader's acts change. */

import { ApiError, get, setKeyPrompt } from "./api.js";
import { answeringChats, forget, onAnswering } from "./asking.js";
import { setFields } from "./chat.js";
import { ChatView } from "./chatview.js";
import { askForKey, openSettings } from "./dialogs.js";
import { forgetFile } from "./documents.js";
import { announce, brief, button, fill, icon } from "./dom.js";
import { closeDrawer } from "./drawer.js";
import { LiveView } from "./live.js";
import { ModelMenu } from "./models.js";
import { applyTheme } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { dropCollections, loadCollections, onCollections } from "./sources.js";
import { deleteChat, listChats, onChange, restoreChat, saveChat } from "./store.js";
import { fileName, save, toJson, toMarkdown } from "./transfer.js";
import { offerBack } from "./undo.js";

const main = document.getElementById("main");
const menu = document.getElementById("menu");
const LOOK_EVERY = 1000; // ms between two looks at a server that loads its model, or reads its folder
const WATCH_EVERY = 3000; // ms between two looks at a server that is there
const LOADING = 503; // the status until the model is loaded
const WANTS_KEY = 401;

const NAME = "slotcache";

const sidebar = new Sidebar(document.getElementById("sidebar"), {
  remove: (chat) => removeChats([chat]), set: setInChat, save: saveFile, close: () => showMenu(false),
});
const chatView = new ChatView({ changed: showChange, opened: (id) => go(`#/chat/${id}`) });
const liveView = new LiveView();
const models = new ModelMenu(() => chatView.showFolder());
let nextLook = 0;
let nextFolder = 0;
let isAway = true; // the server was not seen at the last look
let seen = { model: "", hasFolder: false }; // of the server when it was seen last

function go(hash) {
  if (location.hash !== hash) location.hash = hash;
}

async function route() {
  const [, view = "", id] = location.hash.split("/");
  const isLive = view === "live";
  document.body.dataset.view = isLive ? "live" : "chat";
  for (const [name, current] of [["to-chat", !isLive], ["to-live", isLive]]) {
    const link = document.getElementById(name);
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  closeDrawer();
  showMenu(false);
  if (isLive) {
    main.replaceChildren(liveView.element);
    liveView.start();
  } else {
    liveView.stop();
    main.replaceChildren(chatView.element);
    await chatView.show(view === "chat" ? id : undefined);
  }
  await showChats();
}

async function showChats() {
  const isLive = document.body.dataset.view === "live";
  document.getElementById("to-chat").href = chatView.address;
  document.title = [isLive ? "Live" : chatView.title, NAME].filter(Boolean).join(" · ");
  await sidebar.show(await listChats(), isLive ? null : chatView.id, answeringChats());
}

async function showChange(id) {
  sidebar.changed(id);
  await showChats();
}

/** Rename a chat, or pin it. */
async function setInChat({ id }, fields) {
  const chat = await chatView.chat(id);
  if (!chat) return;
  setFields(chat, fields);
  await saveChat(chat);
  await showChats();
}

async function saveFile({ id }, kind) {
  const chat = await chatView.chat(id);
  if (!chat) return;
  if (kind === "json") save(toJson([chat]), `${fileName(chat.title)}.json`);
  else save(toMarkdown(chat), `${fileName(chat.title)}.md`);
}

/** Delete chats here, and on the server once they can no longer be taken back. */
async function removeChats(chats) {
  const deleted = await takeOut(chats);
  const text = chats.length === 1 ? `“${brief(chats[0].title, 40)}” is deleted.` : `${chats.length} chats are deleted.`;
  const back = async () => {
    for (const one of deleted) await restoreChat(one);
    await showChats();
  };
  const end = (isGoing) => {
    for (const { chat } of deleted) if (chat) forgetAll(chat, isGoing);
  };
  if (chats.length) offerBack(text, back, end);
}

/** Take chats out of this browser, also where one of them is open. @returns what `restoreChat` brings back */
async function takeOut(chats) {
  const deleted = [];
  const current = chatView.id;
  for (const { id } of chats) {
    chatView.drop(id);
    deleted.push(await deleteChat(id));
  }
  if (chats.some(({ id }) => id === current)) go("#/");
  await showChats();
  return deleted;
}

async function forgetAll({ id, searched = [] }, isGoing) {
  await Promise.all([forget(id, isGoing), ...searched.map((one) => forgetFile(one, isGoing))]);
}

async function changedElsewhere(id, isGone) {
  if (isGone) {
    const isShown = chatView.id === id;
    chatView.drop(id);
    if (isShown) go("#/");
  } else {
    await chatView.refresh(id);
  }
  await showChange(id);
}

/** Show chats that were imported, and offer to take them out again. */
async function showImported(chats) {
  await showChats();
  const back = async () => {
    for (const { chat } of await takeOut(chats)) if (chat?.turns.some(({ answerId }) => answerId)) forgetAll(chat);
  };
  offerBack(`${chats.length} ${chats.length === 1 ? "chat is" : "chats are"} imported.`, back, () => {});
}

function showMenu(open) {
  menu.setAttribute("aria-expanded", String(open));
  document.body.classList.toggle("with-menu", open);
}

/** Look at the server again and again, and say in words when it goes, comes back, or is another one. */
async function showServer() {
  clearTimeout(nextLook);
  let about;
  try {
    about = await get("props");
  } catch (error) {
    isAway = true;
    if (error.status === WANTS_KEY) tellOfKey();
    else tell(error instanceof ApiError ? error.message : "The server cannot be reached.");
    if (!(error instanceof ApiError) || error.status === LOADING) nextLook = setTimeout(showServer, LOOK_EVERY);
    return;
  }
  await models.look();
  const now = { model: about.model_alias, hasFolder: about.ui_settings.sources };
  const name = models.element.hidden ? now.model : "";
  if (isAway || seen.hasFolder !== now.hasFolder) await showFolder(now.hasFolder);
  if (isAway) tell([name, ...changesOf(seen, now)].filter(Boolean).join(": "));
  isAway = false;
  seen = now;
  nextLook = setTimeout(showServer, WATCH_EVERY);
}

/** Another scope may have another folder, and another key another server. */
async function lookAnew() {
  isAway = true;
  await showServer();
}

function changesOf(before, now) {
  if (!before.model) return [];
  const another = before.model === now.model ? "" : "another model than before";
  const without = before.hasFolder && !now.hasFolder ? "without its folder" : "";
  return [[another, without].filter(Boolean).join(", ")];
}

function tell(text) {
  const shown = document.getElementById("model");
  if (shown.textContent === text) return;
  shown.textContent = text;
  shown.title = text;
  if (seen.model || isAway) announce(text);
}

function tellOfKey() {
  const enter = button("Enter the key", showServer, { class: "plain" });
  fill(document.getElementById("model"), "Without its key the server answers nothing. ", enter);
}

async function showFolder(isThere = true) {
  clearTimeout(nextFolder);
  const found = isThere ? await loadCollections().catch(() => undefined) : dropCollections(); // undefined: a lost look
  const isRead = found === null || found?.every(({ state }) => state === "ready");
  if (!isRead) nextFolder = setTimeout(showFolder, LOOK_EVERY);
}

function pressed(event) {
  const isCommand = event.ctrlKey || event.metaKey;
  const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "Escape") {
    closeDrawer();
    showMenu(false);
    if (!document.querySelector("dialog[open]")) chatView.stop();
  } else if (event.key === "/" && !isTyping && !isCommand) {
    event.preventDefault();
    chatView.focus();
  } else if (event.key.toLowerCase() === "k" && isCommand && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    showMenu(true);
    sidebar.focus();
  } else if (event.key.toLowerCase() === "o" && event.shiftKey && isCommand) {
    event.preventDefault();
    go("#/");
  }
}

applyTheme();
onChange(changedElsewhere);
onAnswering(showChats);
onCollections(() => chatView.showFolder());
setKeyPrompt(askForKey);
document.getElementById("model").before(models.element);
menu.append(icon("menu"));
menu.addEventListener("click", () => showMenu(!document.body.classList.contains("with-menu")));
const settingsButton = document.getElementById("open-settings");
settingsButton.append(icon("settings"));
settingsButton.addEventListener("click", () => openSettings({
  removeChats: async () => removeChats(await listChats()), imported: showImported, closed: lookAnew, // another scope may have another folder
}));
addEventListener("hashchange", route);
addEventListener("keydown", pressed);
await route();
await showServer();
