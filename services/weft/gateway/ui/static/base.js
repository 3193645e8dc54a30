// What every view is made of: elements and numbers; calls of the gateway with the key of this tab, and the stream of what
// happens now. Texts become text nodes, so that nothing a model or a client says is ever markup.
/** `h("p.note", { hidden: true }, "text", node)`; `onclick` is a listener; null and false are left out. */
export function h(tag, props = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on") || key === "value") node[key] = value;
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return node;
}

/** Sets a text, or an element, only if it differs, so that selections and the focus stay. */
export function put(node, value) {
  if (!(value instanceof Node)) value = document.createTextNode(value);
  if (!node.firstChild?.isEqualNode(value)) node.replaceChildren(value);
}

/** A number in few digits, "–" if it is not known. */
export function num(value) {
  if (!Number.isFinite(value)) return "–";
  const digits = Number.isInteger(value) || Math.abs(value) >= 10 ? 0 : Math.abs(value) < 0.1 ? 3 : 1;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}
export const percent = (value) => (Number.isFinite(value) ? `${num(value * 100)} %` : "–");
export const clock = (unixMs) => new Date(unixMs).toLocaleTimeString("en-GB");

/** `requests_per_s` as a title: "requests/s". */
const title = (name) =>
  name
    .replace(/^(num|is)_/, "")
    .replace("_per_", "/")
    .replace("_mib", " MiB")
    .replaceAll("_", " ");
const plain = (value) =>
  typeof value === "number" ? num(value) : typeof value === "boolean" ? (value ? "yes" : "no") : (value ?? "–");

/** What may be wider than the page scrolls by itself. */
export const scrolled = (label, ...content) =>
  h("div.scroll", { tabindex: "0", role: "region", "aria-label": label }, content);

/** A table of objects, a column for each field; `cells` has the content of some, null leaves a column out. */
export function grid(label, cells = {}) {
  const [head, body] = [h("thead"), h("tbody")];
  const node = scrolled(label, h("table", {}, head, body));
  const fill = (items = []) => {
    node.hidden = !items.length;
    const names = Object.keys(items[0] ?? {}).filter((name) => cells[name] !== null);
    const kind = (name) => (items.every((item) => item[name] == null || typeof item[name] === "number") ? "n" : "t");
    put(
      head,
      h(
        "tr",
        {},
        names.map((name) => h(`th.${kind(name)}`, { scope: "col" }, title(name))),
      ),
    );
    while (body.rows.length > items.length) body.lastChild.remove();
    items.forEach((item, i) => {
      const row = body.rows[i] ?? body.appendChild(h("tr"));
      while (row.cells.length < names.length) row.append(h(`td.${kind(names[row.cells.length])}`));
      names.forEach((name, at) => put(row.cells[at], (cells[name] ?? plain)(item[name], item)));
    });
  };
  return { node, fill };
}

/** A bar of `share` (0..1) from `start`; its number stands beside it as text. */
export function bar(share, start = 0, kind = "fill") {
  const inner = h(`i.${kind}`);
  inner.style.left = `${Math.min(start, 1) * 100}%`;
  inner.style.width = `${Math.max(Math.min(share, 1 - start), 0) * 100}%`;
  return inner;
}
export const track = (...bars) => h("div.track", { "aria-hidden": "true" }, bars);

/** Pairs of a name and a number as bars; the largest is full. */
export function histogram(pairs) {
  const most = Math.max(...pairs.map(([, value]) => value), 1e-9);
  return h(
    "div.histogram",
    {},
    pairs.map(([name, value]) => [
      h("span.n", {}, String(name)),
      track(bar(value / most)),
      h(
        "span.n",
        {},
        value && value < 0.001 ? value.toExponential(1) : value.toLocaleString("en", { maximumSignificantDigits: 3 }),
      ),
    ]),
  );
}

/** Names and values as a list; those without a value are left out. */
export const facts = (pairs) =>
  h(
    "dl",
    {},
    Object.entries(pairs).map(
      ([name, value]) => value != null && value !== "" && value !== false && [h("dt", {}, name), h("dd", {}, value)],
    ),
  );

export const folded = (summary, ...content) => h("details", {}, h("summary", {}, summary), content);

const GOOD = { OK: "●", READY: "●", serving: "●", PROMOTED: "●", RUNNING: "▶" };
const CALM = { LOADING: "…", PAUSED: "‖", SKIPPED: "○", CANCELLED: "~" };

/** A state by mark, word and colour. */
export const pill = (state) =>
  h(
    `span.pill.${state in GOOD ? "good" : state in CALM ? "calm" : "bad"}`,
    {},
    `${GOOD[state] ?? CALM[state] ?? "▲"} ${state || "unknown"}`,
  );

/** Whether the user agrees; with `key` the text that was entered, "" if none. */
export function ask(heading, question, verb, { key = false } = {}) {
  const [dialog, title, text, field, ok] = ["ask", "ask-title", "ask-text", "ask-key", "ask-ok"].map((id) =>
    document.getElementById(id),
  );
  [title.textContent, text.textContent, ok.textContent] = [heading, question, verb];
  field.hidden = !key;
  field.value = dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "ok" && (!key || field.value.trim())), {
      once: true,
    });
  });
}

const ROOT = new URL("../..", import.meta.url);
/** Events `state`, `tick`, `down`, `denied`; their data is `detail`, and the latest of each is in `latest`. */
export const live = new EventTarget();
export const latest = {};
export const encode = encodeURIComponent;
export const address = (path) => new URL(path, ROOT).href;
export const key = () => sessionStorage.getItem("weft-key");
export const keep = (value) => sessionStorage.setItem("weft-key", value);

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
  const tell = (type, detail) => live.dispatchEvent(new CustomEvent(type, { detail: (latest[type] = detail) }));
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
  const said = await read("ui/api/control", { body: action }).then(
    ({ done }) => done,
    (error) => `▲ ${error.message}`,
  );
  put(document.getElementById("said"), said);
}
