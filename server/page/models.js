/** The models of a server that has several: which of them are in memory, and the one that is asked. */

import { get } from "./api.js";
import { h } from "./dom.js";
import { change, settings } from "./settings.js";

const LOOK_EVERY = 2000; // ms between two looks at which are in memory
const STATES = { loaded: "in memory", loading: "loading", failed: "cannot be loaded" };

/** @type {string[]} the first one answers where none is named; empty: the server has only one */
let names = [];

/** @returns {string[]} the names of the models, none where the server has only one */
export function modelNames() {
  return names;
}

/** @returns {{model?: string}} the field of a request that names its model */
export function modelField() {
  return names.includes(settings().model) ? { model: settings().model } : {};
}

/** @returns {string} the model that is asked; nothing where the server has only one */
export function askedModel() {
  return modelField().model ?? names[0] ?? "";
}

/** @returns {boolean} whether the first model is asked, to which the server's folders belong */
export function asksFirst() {
  return askedModel() === (names[0] ?? "");
}

/** A menu of the models, hidden where there is only one. */
export class ModelMenu {
  /** @param {() => void} changed  called when another model is chosen */
  constructor(changed) {
    this._timer = 0;
    this.element = h("select.models", { hidden: true, "aria-label": "Model", onchange: () => {
      change({ model: this.element.value });
      changed();
    } });
  }

  /** Ask which models there are, and go on doing so where there are several. */
  async look() {
    clearTimeout(this._timer);
    const { models } = document.hidden ? {} : await get("health").catch(() => ({}));
    if (models) this._show(models);
    if (names.length) this._timer = setTimeout(() => this.look(), LOOK_EVERY);
  }

  _show(models) {
    if (names.join("\n") !== Object.keys(models).join("\n")) {
      names = Object.keys(models);
      this.element.replaceChildren(...names.map((name) => h("option", { value: name })));
      this.element.value = askedModel();
      this.element.hidden = false;
    }
    for (const option of this.element.options) {
      const text = [option.value, STATES[models[option.value]]].filter(Boolean).join(" · ");
      if (option.textContent !== text) option.textContent = text;
    }
  }
}
