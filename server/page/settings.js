/** What the reader has chosen, kept in this browser. */

const NAME = "slotcache.settings";
const DEFAULTS = { theme: "auto", system: "", temperature: "", maxTokens: "", scope: "", model: "", retrieval: true };

let current = { ...DEFAULTS, ...read() };

function read() {
  try {
    return JSON.parse(localStorage.getItem(NAME) ?? "{}");
  } catch {
    return {};
  }
}

/** @returns {typeof DEFAULTS} */
export function settings() {
  return current;
}

/** Change some settings and keep them. @param {Partial<typeof DEFAULTS>} changes */
export function change(changes) {
  current = { ...current, ...changes };
  localStorage.setItem(NAME, JSON.stringify(current));
  applyTheme();
}

/** Show the page in the chosen theme. */
export function applyTheme() {
  document.documentElement.dataset.theme = current.theme;
}

/** @returns {object} the fields of a request that the settings stand for */
export function requestFields() {
  return {
    ...(current.temperature !== "" && { temperature: Number(current.temperature) }),
    ...(current.maxTokens !== "" && { max_tokens: Number(current.maxTokens) }),
    ...scopeField(),
  };
}

/** @returns {{cache_scope?: string}} */
export function scopeField() {
  return current.scope ? { cache_scope: current.scope } : {};
}

/**
 * @param {Record<string, string|number|undefined>} [others]  parameters beside the scope
 * @returns {string} the scope as the query of an address
 */
export function scopeQuery(others = {}) {
  const given = Object.entries({ scope: current.scope, ...others }).filter(([, value]) => value);
  return given.length ? `?${new URLSearchParams(given)}` : "";
}
