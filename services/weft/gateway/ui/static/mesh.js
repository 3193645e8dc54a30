// Calls of the gateway with the key of this tab, and the stream of what happens now.
import { ask, put } from "./dom.js";

const ROOT = new URL("../..", import.meta.url);
const live = new EventTarget();
/** The latest event of each type: `state`, `tick`, `down`, `denied`. */
export const latest = {};
export const encode = encodeURIComponent;
export const address = (path) => new URL(path, ROOT).href;
export const key = () => sessionStorage.getItem("weft-key");
export const keep = (value) => sessionStorage.setItem("weft-key", value);

/** Calls `use` with the latest event of a type, if there is one, and with each that comes until `signal` ends. */
export function on(type, use, signal) {
  live.addEventListener(type, ({ detail }) => use(detail), { signal });
  if (latest[type]) use(latest[type]);
}

function tell(type, detail) {
  latest[type] = detail;
  live.dispatchEvent(new CustomEvent(type, { detail }));
}

/** The response; throws an Error with the server's message and `status`. A body that is no Blob goes as JSON. */
export async function call(path, { body, headers = {}, signal } = {}) {
  const isJson = body !== undefined && !(body instanceof Blob);
  const response = await fetch(address(path), {
    method: body === undefined ? "GET" : "POST",
    body: isJson ? JSON.stringify(body) : body,
    signal,
    headers: {
      ...headers,
      "x-weft-ui": "1",
      ...(isJson && { "content-type": "application/json" }),
      ...(key() && { authorization: `Bearer ${key()}` }),
    },
  });
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({ error: response.statusText }));
  throw Object.assign(new Error(error.message ?? error), { status: response.status });
}

export const read = async (path, options) => (await call(path, options)).json();

/** Server-sent events of a response, as [type, JSON]. */
export async function* events(response) {
  const parts = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (let part = await parts.read(); !part.done; part = await parts.read()) {
    const blocks = (waiting + part.value).split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const data = /^data: *(.*)$/m.exec(block)?.[1];
      if (data) yield [/^event: *(.*)$/m.exec(block)?.[1], JSON.parse(data)];
    }
  }
}

let watched = [];
let stop = new AbortController();

/** Follows these graphs while the page is visible; a stream that ends is opened again. */
export function watch(graphs = watched) {
  watched = graphs;
  stop.abort();
  stop = new AbortController();
  if (!document.hidden) void follow(new URLSearchParams(graphs.map((name) => ["graph", name])), stop.signal);
}
document.addEventListener("visibilitychange", () => watch());

async function follow(query, signal) {
  for (let failures = 0; !signal.aborted; failures += 1) {
    try {
      for await (const [type, data] of events(await call(`ui/api/live?${query}`, { signal }))) {
        if (signal.aborted) return;
        failures = 0;
        tell(type, data);
        if (type === "denied") return;
      }
      throw new Error("the gateway ended the connection");
    } catch (error) {
      if (signal.aborted) return;
      const isDenied = error.status === 401 || error.status === 403;
      tell(isDenied ? "denied" : "down", { reason: error.message });
      if (isDenied) return;
    }
    await new Promise((done) => setTimeout(done, Math.min(500 * 2 ** failures, 8000)));
  }
}

/** Does what `/ui/api/control` takes, after `question` if there is one; says what came of it. */
export async function control(action, question) {
  if (question && !(await ask(...question))) return;
  const said = document.getElementById("said");
  try {
    put(said, (await read("ui/api/control", { body: action })).done);
  } catch (error) {
    put(said, `▲ ${error.message}`);
  }
}
