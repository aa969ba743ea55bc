/** Elements are made here and nowhere else: text is always text, and no HTML is read. */

/**
 * Make an element.
 * @param {string} tag  a name with classes, such as "p.note"
 * @param {object} [properties]  `on...` are listeners, `data` goes to the dataset, false and null are left out
 * @param {...(Node|string|null|undefined|Array)} children
 * @returns {HTMLElement}
 */
export function h(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) set(element, key, value);
  element.append(...present(children));
  return element;
}

/** Replace what an element holds. @param {Element} element @param {...(Node|string|null|undefined|Array)} children */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
}

function present(children) {
  return children.flat(3).filter((child) => child !== null && child !== undefined && child !== false);
}

function set(element, key, value) {
  if (value === false || value === null || value === undefined) return;
  if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
  else if (key === "data") Object.assign(element.dataset, value);
  else if (key === "value") element.value = value;
  else element.setAttribute(key, value === true ? "" : value);
}

/**
 * Make a line drawing of 20 by 20, for a button. Its meaning stands in the button's label.
 * @param {keyof typeof SHAPES} name
 * @returns {SVGElement}
 */
export function icon(name) {
  return svg("svg", { viewBox: "0 0 20 20", class: "drawing", "aria-hidden": "true" }, svg("path", { d: SHAPES[name] }));
}

/**
 * Make an element of a drawing.
 * @param {string} tag
 * @param {object} attributes
 * @param {...Node} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/**
 * Make a button.
 * @param {string} label  its text, or with a drawing its label
 * @param {(event: Event) => void} act
 * @param {{drawing?: keyof typeof SHAPES, [attribute: string]: unknown}} [properties]
 * @returns {HTMLElement}
 */
export function button(label, act, { drawing, ...properties } = {}) {
  const own = { type: "button", onclick: act, ...properties };
  return drawing
    ? h("button.icon", { ...own, "aria-label": label, title: label }, icon(drawing))
    : h("button", own, label);
}

/** Say something to a screen reader, without moving the focus. @param {string} text */
export function announce(text) {
  document.getElementById("status").textContent = text;
}

/** @param {number} number @returns {string} with separators of thousands, and one decimal below ten */
export function figure(number) {
  return number.toLocaleString("en", { maximumFractionDigits: Math.abs(number) < 10 ? 1 : 0 });
}

/** @param {number} ms @returns {string} a length of time, in ms or s */
export function duration(ms) {
  return ms < 1000 ? `${figure(ms)} ms` : `${(ms / 1000).toLocaleString("en", { maximumFractionDigits: ms < 1e4 ? 1 : 0 })} s`;
}

/** @param {number} bytes @returns {string} */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes < 1 ? 0 : Math.min(Math.floor(Math.log2(bytes) / 10), 4);
  return `${figure(bytes / 1024 ** power)} ${units[power]}`;
}

/** @param {string} text @param {number} most @returns {string} its first characters, on one line */
export function brief(text, most) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most - 1).trimEnd()}…` : line;
}

const SHAPES = {
  menu: "M3 5.5h14M3 10h14M3 14.5h14",
  settings: "M3 6h7M14 6h3M3 14h3M10 14h7M12 4v4M8 12v4",
  plus: "M10 4v12M4 10h12",
  close: "M5 5l10 10M15 5L5 15",
  send: "M10 16V4.5M5 9.5l5-5 5 5",
  stop: "M6 6h8v8H6z",
  again: "M15.5 9.5a5.5 5.5 0 1 1-1.7-4M14.5 2.8v3.4h-3.4",
  edit: "M4 16l.8-3.4L13 4.4l2.6 2.6-8.2 8.2L4 16z",
  copy: "M7 7h9v9H7zM4 13V4h9",
  clip: "M15 8.5l-6 6a3.2 3.2 0 0 1-4.5-4.5l6.5-6.4a2.1 2.1 0 0 1 3 3l-6.3 6.2a1 1 0 0 1-1.4-1.4L12 6",
  folder: "M3 6.5V15h14V7.5H10L8.5 5H3z",
  bin: "M4 6h12M8 6V4h4v2M6 6l.7 10h6.6L14 6",
  more: "M5 10h.01M10 10h.01M15 10h.01",
  down: "M10 4v11.5M5 10.5l5 5 5-5",
  back: "M12 5l-5 5 5 5",
  forth: "M8 5l5 5-5 5",
};
