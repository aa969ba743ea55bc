/** The clipboard, which the page also reaches where it is not served securely: over HTTP from another machine. */

import { announce, h } from "./dom.js";

const TOLD_FOR = 4000; // ms

/**
 * Copy a text, and say beside the button whether it worked.
 * @param {string} text
 * @param {HTMLElement} pressed  the button
 */
export async function copy(text, pressed) {
  const isCopied = (await write(text)) || writeByField(text, pressed);
  const told = isCopied ? "Copied" : "This browser does not let the page copy. Select the text instead.";
  announce(told);
  const note = h("span.copied", { "aria-hidden": "true" }, told); // the announcement is for those who do not see it
  pressed.parentElement.querySelector(".copied")?.remove();
  pressed.before(note);
  setTimeout(() => note.remove(), TOLD_FOR);
}

/** By the interface that only a secure page has. */
async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** By a field whose text is selected, as a reader would do it. */
function writeByField(text, pressed) {
  const field = h("textarea.unseen", { readonly: true, value: text, "aria-hidden": "true", tabindex: "-1" });
  pressed.after(field);
  field.focus();
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  pressed.focus();
  return isCopied;
}
