// Elements, numbers and tables. Texts become text nodes, so that nothing a model or a client says is ever markup.
/** `h("p.note", { hidden: true }, "text", node)`, `h("p", "text")`; `onclick` is a listener; null and false are left out. */
export function h(tag, ...content) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(content[0]?.constructor === Object ? content.shift() : {})) {
    if (key.startsWith("on") || key === "value") node[key] = value;
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...content.flat(Infinity).filter((child) => child != null && child !== false));
  return node;
}

/** Gives a node this content; of what is there only differences change, so focus, selections and what is unfolded stay. */
export const put = (node, ...content) => become(node, [...h("i", content).childNodes]);

function become(node, wanted) {
  wanted.forEach((child, i) => {
    const own = node.childNodes[i];
    if (own?.isEqualNode(child)) return; // of a large table most rows; a click on it does the same, too
    if (own?.nodeName !== child.nodeName) return own ? own.replaceWith(child) : node.append(child);
    if (own instanceof Text) return (own.data = child.data);
    for (const { name } of [...own.attributes])
      if (!["open", "style"].includes(name) && !child.hasAttribute(name)) own.removeAttribute(name);
    for (const { name, value } of child.attributes)
      if (name !== "style" && own.getAttribute(name) !== value) own.setAttribute(name, value);
    own.style.cssText = child.style.cssText; // as an attribute the policy forbids it
    own.onclick = child.onclick;
    become(own, [...child.childNodes]);
  });
  while (node.childNodes.length > wanted.length) node.lastChild.remove();
}

export const button = (name, onclick, more) => h("button", { type: "button", onclick, ...more }, name);
export const folded = (summary, ...content) => h("details", h("summary", summary), content);

/** What may be wider than the page scrolls by itself. */
export const scrolled = (label, ...content) =>
  h("div.scroll", { tabindex: "0", role: "region", "aria-label": label }, content);

/** Names and values as a list; those without a value are left out. */
export const facts = (pairs) => {
  const told = Object.entries(pairs).filter(([, value]) => value != null && value !== "" && value !== false);
  const rows = told.map(([name, value]) => [h("dt", name), h("dd", value)]);
  return h("dl", rows);
};

const FORMATS = [0, 1, 2, 3].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));
/** A number in few digits, "–" if it is not known. */
export function num(value) {
  if (!Number.isFinite(value)) return "–";
  const digits = Number.isInteger(value) || Math.abs(value) >= 10 ? 0 : Math.abs(value) < 0.1 ? 3 : 1;
  return FORMATS[digits].format(value);
}
export const percent = (value) => (Number.isFinite(value) ? `${num(value * 100)} %` : "–");
export const clock = (unixMs) => new Date(unixMs).toLocaleTimeString("en-GB");

const GOOD = { OK: "●", READY: "●", serving: "●", PROMOTED: "●", RUNNING: "▶" };
const CALM = { LOADING: "…", PAUSED: "‖", SKIPPED: "○", CANCELLED: "~" };

/** A state by mark, word and colour. */
export function pill(state) {
  const kind = state in GOOD ? "good" : state in CALM ? "calm" : "bad";
  return h(`span.pill.${kind}`, `${GOOD[state] ?? CALM[state] ?? "▲"} ${state || "unknown"}`);
}

/** Pairs of a name and a number as bars; the largest is full. */
export function histogram(pairs, max = Math.max(...pairs.map(([, value]) => value), 1e-9)) {
  const short = (value) => (Number.isInteger(value) ? num(value) : Number(value.toPrecision(3)));
  const bar = ([name, value]) => [name, h("meter", { max, value, "aria-hidden": "true" }), short(value)];
  const cells = pairs.flatMap(bar).map((one) => h("span", one));
  return h("div.histogram", cells);
}

const SIGNS = { _per_: "/", _mib: " MiB", _: " " };
/** `requests_per_s` as a title: "requests/s". */
const title = (name) => name.replace(/^(num|is)_/, "").replace(/_per_|_mib|_/g, (part) => SIGNS[part]);
const plain = (value) =>
  typeof value === "number" ? num(value) : typeof value === "boolean" ? (value ? "yes" : "no") : (value ?? "–");
const fault = (is) => (is ? "▲ yes" : "no");
const CELLS = { state: pill, status: pill, is_degraded: fault, is_broken: fault };

/** A table of objects, a column for each field; `own` has the content of some, null leaves a column out. No rows: null. */
export function table(label, rows, own = {}) {
  if (!rows.length) return null;
  const cells = { ...CELLS, ...own };
  const names = Object.keys(rows[0]).filter((name) => cells[name] !== null);
  const kinds = names.map((name) => (rows.every((row) => typeof (row[name] ?? 0) === "number") ? ".n" : ""));
  const head = names.map((name, i) => h(`th${kinds[i]}`, { scope: "col" }, title(name)));
  const line = (row) => names.map((name, i) => h(`td${kinds[i]}`, (cells[name] ?? plain)(row[name], row)));
  const body = rows.map((row) => h("tr", line(row)));
  return scrolled(label, h("table", h("thead", h("tr", head)), h("tbody", body)));
}

/** Whether the user agrees; with `key` the text that was entered, "" if none. */
export async function ask(heading, question, verb, { key = false } = {}) {
  const dialog = document.querySelector("dialog");
  const [title, text, field, ok] = dialog.querySelectorAll("h2, p, input, button");
  [title.textContent, text.textContent, ok.textContent] = [heading, question, verb];
  field.hidden = !key;
  field.value = dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  await new Promise((done) => dialog.addEventListener("close", done, { once: true }));
  return dialog.returnValue === "ok" && (!key || field.value.trim());
}
