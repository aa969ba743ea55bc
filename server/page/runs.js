/** The cached runs as blocks to draw: a tree of prompts that share their beginnings. */

const SHORT = 24; // tokens: shorter runs are drawn together with their only neighbour, if they are in the same state

/**
 * @typedef {object} Block
 * @property {string} id  of its last run
 * @property {string[]} ids  of all its runs
 * @property {number} start
 * @property {number} tokens
 * @property {"device"|"host"|"ahead"} place
 * @property {object} run  its last run, as the server lists it
 * @property {Block|null} parent
 * @property {Block[]} children
 * @property {number} row  the first of its rows
 * @property {number} rows  one for each leaf behind it
 * @property {number} level  1 for the first
 * @property {number} left  its place and width as they are drawn, in tokens: short blocks are drawn wider
 * @property {number} width
 */

/**
 * @param {object[]} runs  of `/v1/cache`
 * @param {number} least  the share of the whole width that a block has at least
 * @returns {{blocks: Block[], rows: number, end: number}} the blocks from the first row to the last, parents first
 */
export function layOut(runs, least) {
  const blocks = new Map(runs.map((run) => [run.id, blockOf(run)]));
  const roots = [];
  for (const block of blocks.values()) {
    block.parent = blocks.get(block.run.parent) ?? null;
    (block.parent?.children ?? roots).push(block);
  }
  const drawn = [];
  let rows = 0;
  let end = 1;
  const shortest = least * Math.max(1, ...runs.map(({ start, tokens }) => start + tokens));
  const stack = opened(roots).reverse();
  while (stack.length) {
    const block = stack.pop();
    block.children = opened(block.children);
    block.row = rows;
    block.level = (block.parent?.level ?? 0) + 1;
    block.left = block.parent ? block.parent.left + block.parent.width : 0;
    block.width = Math.max(block.tokens, shortest);
    end = Math.max(end, block.left + block.width);
    drawn.push(block);
    if (block.children.length) stack.push(...[...block.children].reverse());
    else rows += 1;
  }
  for (const block of [...drawn].reverse()) {
    block.rows = block.children.length ? block.children.reduce((sum, child) => sum + child.rows, 0) : 1;
  }
  return { blocks: drawn, rows, end };
}

function blockOf(run) {
  const place = run.device_tokens ? "device" : run.host ? "host" : "ahead";
  return { id: run.id, ids: [run.id], start: run.start, tokens: run.tokens, place, run, parent: null, children: [], row: 0, rows: 1, level: 1, left: 0, width: 0 };
}

/** Children as they are drawn, in the order of their first ids, so that it stays while the tree grows. */
function opened(blocks) {
  return blocks.sort((one, other) => (one.id < other.id ? -1 : 1)).map(merged);
}

/** Return a block joined with the only one behind it, again and again, where both are short parts of one state. */
function merged(block) {
  let whole = block;
  while (whole.children.length === 1) {
    const [child] = whole.children;
    if (Math.max(whole.run.tokens, child.tokens) >= SHORT || stateOf(whole) !== stateOf(child)) break;
    const { id, run, children } = child;
    whole = { ...whole, id, run, children, ids: [...whole.ids, id], tokens: whole.tokens + child.tokens };
    for (const grandchild of children) grandchild.parent = whole;
  }
  return whole;
}

function stateOf({ place, run }) {
  return [place, run.disk, run.pinned, run.in_use, run.frequency, run.sequences].join();
}

/** @param {Block} block @returns {Generator<Block>} the block, and all behind it */
export function* behind(block) {
  yield block;
  for (const child of block.children) yield* behind(child);
}

/** @param {Block} block @returns {Generator<Block>} the blocks in front of it, the nearest first */
export function* inFront(block) {
  for (let one = block.parent; one; one = one.parent) yield one;
}
