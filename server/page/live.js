/** The live view: figures over time, slots, tiers, and the tree of cached runs. */

import { ApiError, call, get } from "./api.js";
import { duration, figure, h, size, svg } from "./dom.js";
import { History, hitRateOf, parseMetrics } from "./figures.js";
import { modelField } from "./models.js";
import { scopeQuery, settings } from "./settings.js";
import { TreeView } from "./tree.js";

const EVERY = 1000; // ms between two readings
const KEPT = 300; // readings
const LATELY = 60; // readings of which the hit rate is told
const SERIES = [
  ["hit", "Hit rate", "last minute", (history) => percent(history.hitRate(LATELY))],
  ["generated", "Generation", "tokens/s", (history) => told(history.recent("generated", 3))],
  ["read", "Prefill", "tokens/s", (history) => told(history.recent("read", 3))],
  ["waiting", "Queue", "requests", (history) => told(history.points.at(-1)?.waiting ?? null)],
];

/** The view, which reads the server every second while it is shown. */
export class LiveView {
  constructor() {
    this._history = new History(KEPT);
    this._timer = 0;
    this._charts = SERIES.map(([name, title, unit, value]) => new Chart(name, title, unit, value));
    this._slots = h("tbody");
    this._tiers = h("div.tiers");
    this._problem = h("p.notice", { hidden: true, role: "alert" });
    this._tree = new TreeView();
    const heads = ["Slot", "State", "Prompt", "Cached", "Generated"];
    this.element = h("section.live", { "aria-label": "Live" }, this._problem,
      h("div.charts", {}, this._charts.map((chart) => chart.element)),
      h("section.panel", {}, h("h2", {}, "Memory"), this._tiers),
      h("section.panel", {}, h("h2", {}, "Slots"), h("div.wide", { tabindex: "0", role: "region", "aria-label": "Slots" }, h("table.slots", {},
        h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), this._slots))),
      this._tree.element);
  }

  /** Begin to read. */
  async start() {
    this._isOn = true;
    clearTimeout(this._timer);
    await this._tree.learnNames();
    await this._read();
  }

  /** Read no more. */
  stop() {
    this._isOn = false;
    clearTimeout(this._timer);
  }

  async _read() {
    if (!this._isOn) return;
    if (!document.hidden) await this._show().catch((error) => this._tell(error));
    if (this._isOn) this._timer = setTimeout(() => this._read(), EVERY);
  }

  async _show() {
    const query = scopeQuery(modelField());
    const asked = [shown(call(`metrics${query}`)), shown(call(`slots${query}`)), get(`v1/cache${query}`)];
    const [metrics, answer, cache] = await Promise.all(asked);
    const slots = answer ? await answer.json() : [];
    this._problem.hidden = true;
    if (metrics) {
      const values = parseMetrics(await metrics.text());
      this._history.add(values, performance.now());
      this._showTiers(values);
    }
    for (const chart of this._charts) chart.show(this._history);
    this._slots.replaceChildren(...slots.map(slotRow));
    this._tree.show(cache, slots, settings().scope);
  }

  _tell(error) {
    this._problem.textContent = error instanceof ApiError ? error.message : "The server cannot be reached.";
    this._problem.hidden = false;
  }

  _showTiers(values) {
    const cells = values.slotcache_cells;
    const idle = values.slotcache_cells_reclaimable;
    const used = values.slotcache_cells_used;
    const rows = [
      meter("Device", [["used", used - idle], ["idle", idle]], cells, `${figure(used)} of ${figure(cells)} cells, ${figure(idle)} idle`),
      bytes("Host memory", values.slotcache_host_bytes, values.slotcache_host_budget_bytes),
      bytes("Disk", values.slotcache_disk_bytes, values.slotcache_disk_budget_bytes),
    ];
    const pinned = values.slotcache_pinned_tokens;
    this._tiers.replaceChildren(...rows, h("p.soft", {}, [`hit rate since the start ${percent(hitRateOf(values))}`, `${figure(pinned)} tokens pinned`,
      counted(values.slotcache_conversations, "conversation"), `last step ${duration(1000 * values.slotcache_step_seconds)}`].join(" · ")));
  }
}

/** An answer that a setting of the server may have turned off. */
async function shown(answer) {
  try {
    return await answer;
  } catch (error) {
    if (error.status === 501) return null;
    throw error;
  }
}

function slotRow(slot) {
  const cached = slot.n_prompt_tokens_cache ?? 0;
  const done = cached + (slot.n_prompt_tokens_processed ?? 0);
  const isReading = slot.state === "prefill";
  const cells = slot.is_processing
    ? [isReading ? "prefill" : "generating", isReading ? `${figure(done)} / ${figure(slot.n_prompt_tokens)}` : figure(slot.n_prompt_tokens), figure(cached), figure(slot.generated_tokens)]
    : ["idle", slot.n_prompt_tokens ? `${figure(slot.n_prompt_tokens)} kept` : "–", "–", "–"];
  return h("tr", { data: { state: slot.is_processing ? slot.state : "idle" } }, h("th", { scope: "row" }, String(slot.id)), cells.map((text) => h("td", {}, text)));
}

function bytes(name, used, budget) {
  if (!budget) return meter(name, [], 1, "off");
  return meter(name, [[name === "Disk" ? "disk" : "host", used]], budget, `${size(used)} of ${size(budget)}`);
}

function meter(name, parts, total, text) {
  const bar = h("span.meter", { role: "img", "aria-label": `${name}: ${text}` }, parts.map(([kind, value]) => {
    const part = h("span", { data: { kind } });
    part.style.width = `${Math.min((100 * value) / total, 100)}%`;
    return part;
  }));
  return h("div.tier", {}, h("span", {}, name), bar, h("span.soft", {}, text));
}

const counted = (number, noun) => `${figure(number)} ${noun}${number === 1 ? "" : "s"}`;
const percent = (share) => (share === null ? "–" : `${Math.floor(100 * share)} %`);
const told = (value) => (value === null ? "–" : figure(value));

/** A figure with its course over the last minutes. */
class Chart {
  constructor(name, title, unit, value) {
    this._name = name;
    this._title = title;
    this._of = value;
    this._value = h("strong", {}, "–");
    this._line = svg("path", { class: "line" });
    this._dots = svg("path", { class: "dots" });
    this._drawing = svg("svg", { viewBox: "0 0 300 40", preserveAspectRatio: "none", role: "img" }, this._line, this._dots);
    this.element = h("figure.chart", {}, h("figcaption", {}, h("span", {}, title), this._value, h("span.soft", {}, unit)), this._drawing);
  }

  show(history) {
    const values = history.points.map((point) => point[this._name]);
    const most = this._name === "hit" ? 1 : Math.max(1, ...values);
    const y = (value) => (38 - (36 * value) / most).toFixed(1);
    const x = (at) => KEPT - values.length + at;
    const known = values.map((value, at) => [at, value]).filter(([, value]) => value !== null);
    const isSparse = this._name === "hit"; // it has a value only where a prompt was read
    this._line.setAttribute("d", isSparse ? "" : known.map(([at, value], place) => `${place ? "L" : "M"}${x(at)} ${y(value)}`).join(""));
    this._dots.setAttribute("d", isSparse ? known.map(([at, value]) => `M${x(at)} 39V${y(value)}`).join("") : "");
    this._value.textContent = this._of(history);
    this._drawing.setAttribute("aria-label", `${this._title} over the last five minutes, now ${this._value.textContent}`);
  }
}
