/** The server's figures over time, from two readings of `/metrics` each. */

/**
 * Read Prometheus' text: the sums over all labels, by name.
 * @param {string} text
 * @returns {Record<string, number>}
 */
export function parseMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    if (!line.startsWith("slotcache_")) continue;
    const [, name, value] = /^(\w+)(?:\{.*\})? (\S+)/.exec(line) ?? [];
    if (name) values[name] = (values[name] ?? 0) + Number(value);
  }
  return values;
}

/** Readings of the last minutes, and the rates between them. */
export class History {
  /** @param {number} most  readings that are kept */
  constructor(most) {
    this._most = most;
    this._last = null;
    this.points = [];
  }

  /** @param {Record<string, number>} values @param {number} now  ms */
  add(values, now) {
    if (this._last) this.points.push(rates(this._last, { values, now }));
    if (this.points.length > this._most) this.points.shift();
    this._last = { values, now };
  }

  /** @param {string} name @param {number} number @returns {number|null} the mean of the last points that have a value */
  recent(name, number) {
    const known = this.points.slice(-number).map((point) => point[name]).filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  }

  /** @param {number} number @returns {number|null} the share of prompt tokens that were cached lately */
  hitRate(number) {
    const lately = this.points.slice(-number);
    const sum = (name) => lately.reduce((total, point) => total + point[name], 0);
    return share(sum("cached"), sum("computed"));
  }
}

/** @param {Record<string, number>} values  of `parseMetrics` @returns {number|null} the share since the server's start */
export function hitRateOf(values) {
  return share(values.slotcache_cached_tokens_total ?? 0, values.slotcache_prompt_tokens_total ?? 0);
}

function share(cached, computed) {
  return cached + computed ? cached / (cached + computed) : null;
}

function rates(before, after) {
  const seconds = Math.max((after.now - before.now) / 1000, 0.001);
  const grown = (name) => Math.max((after.values[name] ?? 0) - (before.values[name] ?? 0), 0);
  const cached = grown("slotcache_cached_tokens_total");
  const computed = grown("slotcache_prompt_tokens_total");
  return {
    cached,
    computed,
    hit: share(cached, computed),
    generated: grown("slotcache_generated_tokens_total") / seconds,
    read: computed / seconds,
    waiting: after.values.slotcache_requests_waiting ?? 0,
    running: after.values.slotcache_requests_running ?? 0,
  };
}
