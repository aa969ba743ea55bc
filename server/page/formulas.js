/**
 * Formulas: LaTeX between dollar signs or `\( \)` and `\[ \]`, drawn as MathML. The library is loaded with the first one.
 *
 * No HTML is read: the library's tree becomes elements here, of the names and attributes that are listed. A formula that is
 * wrong, or larger than the bounds, stays the text that it is.
 */

import { whenNear } from "./nearby.js";

const MOST_CHARACTERS = 2000;
const MOST_NODES = 5000;
const MOST_DEPTH = 100;
const MOST_AT_ONCE = 50; // formulas of one drawing; the others wait until they come near the screen
const LONG = 60; // characters of a formula that may be wider than the screen
const OPTIONS = { trust: false, throwOnError: true, maxExpand: 200, maxSize: [20, 200] };

// ---- Formulas in Markdown. ----------------------------------------------------------------------------------------------

const CLOSE = { $: "$", $$: "$$", "\\(": "\\)", "\\[": "\\]" };
const NEVER_INSIDE = /[`\uE000\uE001]/; // code, and the marks of citations
const SPACE = /\s/;

/** Let Markdown know formulas. @param {import("./vendor/markdown-it.mjs").default} markdown */
export function addFormulas(markdown) {
  const { escapeHtml } = markdown.utils;
  const shown = ({ content }) => `<span class="formula">${escapeHtml(content)}</span>`;
  markdown.inline.ruler.before("escape", "formula", inText);
  markdown.block.ruler.before("fence", "formula_block", asBlock, { alt: ["paragraph", "reference", "blockquote", "list"] });
  markdown.renderer.rules.formula = (tokens, at) => shown(tokens[at]);
  markdown.renderer.rules.formula_block = (tokens, at) => `<p>${shown(tokens[at])}</p>\n`;
}

function opening(text, at) {
  const two = text.slice(at, at + 2);
  return Object.hasOwn(CLOSE, two) ? two : text[at] === "$" && "$";
}

/** A formula inside a line. From each sign it looks no further than a formula is long. */
function inText(state, silent) {
  const { src, pos } = state;
  const open = opening(src, pos);
  if (!open) return false;
  const close = CLOSE[open];
  const from = pos + open.length;
  const last = ((state.lastSigns ??= {})[close] ??= src.lastIndexOf(close));
  const at = last < from ? -1 : nextSign(src, close, from);
  const stop = at + close.length;
  if (at < 0 || stop > state.posMax || stop - pos > MOST_CHARACTERS) return false;
  const inner = src.slice(from, at);
  if (!inner.trim() || NEVER_INSIDE.test(inner) || (open === "$" && isMoney(src, from, at))) return false;
  if (!silent) state.push("formula", "", 0).content = src.slice(pos, stop);
  state.pos = stop;
  return true;
}

/** Whether dollar signs mean money, or a shell's variables: `$5 and $10`, `$HOME/$USER`. */
function isMoney(text, from, at) {
  const isInWord = /[\p{L}\p{N}$]/u.test(text[from - 2] ?? "");
  return isInWord || SPACE.test(text[from]) || SPACE.test(text[at - 1]) || /[\p{Lu}\p{N}_{]/u.test(text[at + 1] ?? "");
}

/** The next closing sign within the length of a formula; a dollar sign behind a backslash closes nothing. */
function nextSign(text, sign, from) {
  const near = text.slice(from, from + MOST_CHARACTERS);
  let at = near.indexOf(sign);
  while (at > 0 && sign[0] === "$" && near[at - 1] === "\\") at = near.indexOf(sign, at + 1);
  return at < 0 ? -1 : from + at;
}

/** A formula of its own lines, up to a blank one. Without an end its lines are a paragraph. */
function asBlock(state, first, end, silent) {
  if (state.sCount[first] - state.blkIndent >= 4) return false;
  const lineOf = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]).trimEnd();
  const open = opening(lineOf(first), 0);
  const close = CLOSE[open];
  const [inner, isWhole] = open?.length === 2 && open !== "\\(" ? endOf(lineOf(first).slice(2), close) : [];
  if (inner === undefined || (!isWhole && inner >= 0) || NEVER_INSIDE.test(lineOf(first))) return false;
  if (silent) return true;
  const goesOn = (at) => at < end && !state.isEmpty(at) && state.sCount[at] >= state.blkIndent && !NEVER_INSIDE.test(lineOf(at));
  let isClosed = isWhole;
  let line = first + 1;
  for (let at = -1; !isClosed && at < 0 && goesOn(line); line += 1) [at, isClosed] = endOf(lineOf(line), close);
  const lines = [];
  for (let at = first; at < line; at += 1) lines.push(lineOf(at));
  const add = (type, tag, nesting) => Object.assign(state.push(type, tag, nesting), { map: [first, line] });
  if (isClosed) {
    add("formula_block", "", 0).content = lines.join("\n");
  } else {
    add("paragraph_open", "p", 1);
    Object.assign(add("inline", "", 0), { content: lines.join("\n"), children: [] });
    state.push("paragraph_close", "p", -1);
  }
  state.line = line;
  return true;
}

/** Where a line has the closing sign, and whether it ends with it and has no other one. */
function endOf(line, close) {
  const at = line.indexOf(close);
  return [at, at >= 0 && at === line.length - close.length];
}

// ---- Formulas as elements. ----------------------------------------------------------------------------------------------

let library = null;

/** Draw the formulas of a fragment: at once where the library is here, else once they are near the screen. @param {DocumentFragment} fragment */
export function drawFormulas(fragment) {
  fragment.querySelectorAll("span.formula").forEach((one, at) => {
    const source = one.textContent;
    one.classList.toggle("display", source.startsWith("$$") || source.startsWith("\\["));
    if (library && at < MOST_AT_ONCE) draw(one, source);
    else whenNear(one, () => load().then(() => draw(one, source), () => {}));
  });
}

async function load() {
  library ??= (await import("./vendor/temml.mjs")).default;
}

function draw(element, source) {
  const isDisplay = element.classList.contains("display");
  const signs = isDisplay || source.startsWith("\\") ? 2 : 1;
  const latex = source.slice(signs, -signs);
  if (latex.length > MOST_CHARACTERS || !latex.trim()) return;
  try {
    const tree = library.__renderToMathMLTree(latex, { ...OPTIONS, displayMode: isDisplay });
    const budget = { nodes: MOST_NODES };
    const drawn = nodesOf([tree], budget, 0);
    element.replaceChildren(...drawn);
    if (isDisplay || latex.length > LONG) scrollable(element);
  } catch {
    // it stays text
  }
}

/** It may be wider than the screen. */
function scrollable(element) {
  element.classList.add("long");
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", "Formula");
}

const MATHML = "http://www.w3.org/1998/Math/MathML";
const TAGS = new Set(("math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mmultiscripts " +
  "mprescripts none mtable mtr mtd mpadded mphantom mstyle menclose merror").split(" "));
const ATTRIBUTES = new Set(("display displaystyle scriptlevel mathvariant stretchy fence form separator symmetric largeop movablelimits " +
  "accent linethickness lspace rspace width height depth voffset minsize maxsize").split(" "));
const CLASSES = /^(?:tml-(?:left|right|jot|small|fbox|cancel|xcancel)|upstrike|downstrike|sout)$/;
// A style attribute would be refused: what of it the look needs becomes a class.
const LOOKS = [
  ["paddingLeft", /^0(?!\.)/, "flush-left"],
  ["paddingRight", /^0(?!\.)/, "flush-right"],
  ["borderTop", /./, "line-above"],
  ["borderBottom", /./, "line-below"],
  ["borderLeft", /./, "line-left"],
  ["borderRight", /./, "line-right"],
  ["border", /./, "tml-fbox"],
  ["fontWeight", /bold/, "bold"],
];

function nodesOf(trees, budget, depth) {
  if (depth > MOST_DEPTH) throw new RangeError("a formula of too many levels");
  return trees.flatMap((tree) => {
    budget.nodes -= 1;
    if (budget.nodes < 0) throw new RangeError("a formula of too many parts");
    if (typeof tree.text === "string") return tree.text;
    if (tree.type === undefined) return nodesOf(tree.children, budget, depth + 1); // a fragment
    return elementOf(tree, budget, depth);
  });
}

function elementOf({ type, attributes, classes = [], style = {}, children = [] }, budget, depth) {
  if (!TAGS.has(type)) throw new RangeError(`no element of a formula: ${type}`);
  const element = document.createElementNS(MATHML, type);
  for (const [name, value] of Object.entries(attributes)) if (ATTRIBUTES.has(name) && isSmall(value)) element.setAttribute(name, value);
  const looks = LOOKS.filter(([name, pattern]) => pattern.test(style[name] ?? "")).map(([, , look]) => look);
  const kept = [...classes.filter((one) => CLASSES.test(one)), ...looks];
  if (kept.length) element.setAttribute("class", kept.join(" "));
  element.append(...nodesOf(children, budget, depth + 1));
  return element;
}

/** Whether a length leaves what stands around its formula in sight. */
function isSmall(value) {
  return Math.abs(parseFloat(value) || 0) <= 20;
}
