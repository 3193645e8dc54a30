// Makes elements and writes numbers. Texts become text nodes, so that nothing a model or a client says is ever markup.

/** `h("p.note", { hidden: true }, "text", node)`; `onclick` is a listener; null and false are left out. */
export function h(tag, props = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(props ?? {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "value") node.value = value;
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child != null && child !== false));
  return node;
}

/** Sets a text, or an element, only if it differs, so that selections and the focus stay. */
export function put(node, value) {
  if (value instanceof Node) {
    if (!node.firstChild?.isEqualNode(value)) node.replaceChildren(value);
  } else if (node.textContent !== value) node.textContent = value;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
/** A number in few digits, "–" if it is not known. */
export const num = (value) => (isNumber(value)
  ? value.toLocaleString("en", { maximumFractionDigits: Number.isInteger(value) || Math.abs(value) >= 10 ? 0 : 1 }) : "–");
export const percent = (value) => (isNumber(value) ? `${num(value * 100)} %` : "–");
export const clock = (unixMs) => new Date(unixMs).toLocaleTimeString("en-GB");
/** `requests_per_s` as a title: "requests/s". */
const title = (name) => name.replace(/^(num|is)_/, "").replace("_per_", "/").replaceAll("_", " ");

function text(value) {
  if (value === true) return "yes";
  if (value === false) return "no";
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : typeof value === "number" ? num(value) : value;
}

/** A table of objects, a column for each field; `cells` has the content of some, null leaves out. */
export function grid(label, cells = {}) {
  const [head, body] = [h("tr"), h("tbody")];
  const rows = h("table", { "aria-label": label }, h("thead", {}, head), body);
  const node = h("div.scroll", { tabindex: "0", role: "region", "aria-label": label, hidden: true }, rows);
  const fill = (items) => {
    const names = [...new Set(items.flatMap(Object.keys))].filter((name) => cells[name] !== null);
    const kind = (name) => (items.some((item) => typeof item[name] === "number") ? "n" : "t");
    if (names.join() !== head.dataset.names) {
      head.replaceChildren(...names.map((name) => h(`th.${kind(name)}`, { scope: "col" }, title(name))));
      head.dataset.names = names.join();
      body.replaceChildren();
    }
    while (body.rows.length > items.length) body.lastChild.remove();
    items.forEach((item, i) => {
      const row = body.rows[i] ?? body.appendChild(h("tr", {}, names.map((name) => h(`td.${kind(name)}`))));
      names.forEach((name, at) => put(row.cells[at], (cells[name] ?? text)(item[name], item)));
    });
    node.hidden = !items.length;
  };
  return { node, fill };
}

/** A bar of `share` (0..1) from `start`; its number stands beside it as text. */
export function bar(share, start = 0, kind = "fill") {
  const inner = h(`i.${kind}`);
  const within = (value) => Math.min(Math.max(value || 0, 0), 1) * 100;
  inner.style.left = `${within(start)}%`;
  inner.style.width = `${Math.min(within(share), 100 - within(start))}%`;
  return inner;
}

/** Pairs of a name and a number as bars; the largest is full. */
export function histogram(pairs) {
  const most = Math.max(...pairs.map(([, value]) => value), 1e-9);
  const digits = (value) => (Number.isInteger(value) ? num(value) : value.toPrecision(3));
  return h("div.histogram", {}, pairs.map(([name, value]) =>
    [h("span.n", {}, String(name)), h("div.track", { "aria-hidden": "true" }, bar(value / most)), h("span.n", {}, digits(value))]));
}

/** Names and values as a list; those without a value are left out. */
export const facts = (pairs) => h("dl", {}, Object.entries(pairs)
  .filter(([, value]) => value != null && value !== "" && value !== false)
  .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

export const folded = (summary, ...content) => h("details", {}, h("summary", {}, summary), ...content);

const MARKS = { OK: "●", READY: "●", serving: "●", PROMOTED: "●", RUNNING: "▶" };
const CALM = { LOADING: "…", PAUSED: "‖", SKIPPED: "○", CANCELLED: "~" };

/** A state by mark, word and colour. */
export function pill(state) {
  const kind = state in MARKS ? "good" : state in CALM ? "calm" : "bad";
  return h(`span.pill.${kind}`, {}, `${MARKS[state] ?? CALM[state] ?? "▲"} ${state || "unknown"}`);
}

/** Whether the user agrees; with `key` the text that was entered, "" if none. */
export function ask(heading, question, verb, { key = false } = {}) {
  const [dialog, field] = [document.getElementById("ask"), document.getElementById("ask-key")];
  put(document.getElementById("ask-title"), heading);
  put(document.getElementById("ask-text"), question);
  put(document.getElementById("ask-ok"), verb);
  field.hidden = !key;
  field.value = dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((done) => {
    const agreed = () => dialog.returnValue === "ok";
    dialog.addEventListener("close", () => done(key ? agreed() && field.value.trim() : agreed()), { once: true });
  });
}
