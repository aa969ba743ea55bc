/** The server's routes, called with the key if it wants one. */

const KEY = "slotcache.key";

/** An answer that is an error. `code` is the server's name for it, or the status; `param` the field that is wrong; `details` all it says. */
export class ApiError extends Error {
  /** @param {number} status @param {{message?: string, code?: string|number, param?: string}} error */
  constructor(status, error) {
    super(error.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error.code ?? status;
    this.param = error.param;
    this.details = error;
  }
}

let askForKey = async () => null;

/** Set what asks the reader for a key. @param {() => Promise<string|null>} ask */
export function setKeyPrompt(ask) {
  askForKey = ask;
}

/** @returns {string} the key of this browser, or nothing */
export function storedKey() {
  return localStorage.getItem(KEY) ?? "";
}

/** @param {string} key  nothing: forget it */
export function storeKey(key) {
  if (key) localStorage.setItem(KEY, key);
  else localStorage.removeItem(KEY);
}

/**
 * Call a route. Where the server wants a key, the reader is asked, and the call made again.
 * @param {string} path  relative to the page
 * @param {{method?: string, body?: object, file?: Blob, signal?: AbortSignal, keepalive?: boolean}} [options]
 *   file: the body as it is. keepalive: the call is made although the page goes
 * @returns {Promise<Response>}
 * @throws {ApiError}
 */
export async function call(path, options = {}) {
  const { method, body, file, signal, keepalive } = options;
  const used = storedKey();
  const answer = await fetch(path, {
    method: method ?? (body || file ? "POST" : "GET"),
    body: file ?? (body && JSON.stringify(body)),
    signal,
    keepalive,
    headers: {
      ...(body && { "Content-Type": "application/json" }),
      ...(file && { "Content-Type": "application/octet-stream" }),
      ...(used && { Authorization: `Bearer ${used}` }),
    },
  });
  if (answer.ok) return answer;
  if (answer.status === 401) {
    const key = storedKey() === used ? await askForKey() : storedKey(); // another call may have asked already
    if (key !== null) return call(path, options);
  }
  throw await errorOf(answer);
}

async function errorOf(answer) {
  const body = await answer.json().catch(() => ({}));
  return new ApiError(answer.status, body.error ?? {});
}

/** @param {string} path @param {object} [options] as for `call` @returns {Promise<any>} the decoded answer */
export async function get(path, options) {
  return (await call(path, options)).json();
}

/**
 * Call a route whose answer is a stream of events.
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<any>} the decoded events
 * @throws {ApiError} also for an error inside the stream
 */
export async function* stream(path, body, signal) {
  const answer = await call(path, { body: { ...body, stream: true }, signal });
  let rest = "";
  for await (const text of textOf(answer.body)) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(event.error.code, event.error);
      yield event;
    }
  }
}

async function* textOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let piece;
  try {
    while (!(piece = await reader.read()).done) yield piece.value;
  } finally {
    if (!piece?.done) reader.cancel().catch(() => {}); // left in the middle: the server ends the answer
  }
}
