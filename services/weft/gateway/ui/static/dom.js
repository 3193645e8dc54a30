// Makes elements and writes numbers. Texts become text nodes, so that nothing a model or a client says is ever markup.

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
const title = (name) => name.replace(/^(num|is)_/, "").replace("_per_", "/").replace("_mib", " MiB").replaceAll("_", " ");
const plain = (value) => (typeof value === "number" ? num(value) : typeof value === "boolean" ? (value ? "yes" : "no") : value ?? "–");

/** What may be wider than the page scrolls by itself. */
export const scrolled = (label, ...content) => h("div.scroll", { tabindex: "0", role: "region", "aria-label": label }, content);

/** A table of objects, a column for each field; `cells` has the content of some, null leaves a column out. */
export function grid(label, cells = {}) {
  const [head, body] = [h("thead"), h("tbody")];
  const node = scrolled(label, h("table", {}, head, body));
  const fill = (items = []) => {
    node.hidden = !items.length;
    const names = Object.keys(items[0] ?? {}).filter((name) => cells[name] !== null);
    const kind = (name) => (items.every((item) => item[name] == null || typeof item[name] === "number") ? "n" : "t");
    put(head, h("tr", {}, names.map((name) => h(`th.${kind(name)}`, { scope: "col" }, title(name)))));
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
  return h("div.histogram", {}, pairs.map(([name, value]) =>
    [h("span.n", {}, String(name)), track(bar(value / most)), h("span.n", {}, num(value))]));
}

/** Names and values as a list; those without a value are left out. */
export const facts = (pairs) => h("dl", {}, Object.entries(pairs).map(([name, value]) =>
  value != null && value !== "" && value !== false && [h("dt", {}, name), h("dd", {}, value)]));

export const folded = (summary, ...content) => h("details", {}, h("summary", {}, summary), content);

const GOOD = { OK: "●", READY: "●", serving: "●", PROMOTED: "●", RUNNING: "▶" };
const CALM = { LOADING: "…", PAUSED: "‖", SKIPPED: "○", CANCELLED: "~" };

/** A state by mark, word and colour. */
export const pill = (state) => h(`span.pill.${state in GOOD ? "good" : state in CALM ? "calm" : "bad"}`, {},
  `${GOOD[state] ?? CALM[state] ?? "▲"} ${state || "unknown"}`);

/** Whether the user agrees; with `key` the text that was entered, "" if none. */
export function ask(heading, question, verb, { key = false } = {}) {
  const [dialog, title, text, field, ok] = ["ask", "ask-title", "ask-text", "ask-key", "ask-ok"].map((id) => document.getElementById(id));
  [title.textContent, text.textContent, ok.textContent] = [heading, question, verb];
  field.hidden = !key;
  field.value = dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "ok" && (!key || field.value.trim())), { once: true });
  });
}
