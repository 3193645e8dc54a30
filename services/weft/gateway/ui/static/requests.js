// Requests: the latest that were traced, the slowest, the failed; each with its waterfall.

import { encode, live, read, watch } from "./api.js";
import { clock, facts, grid, h, num, pill } from "./dom.js";
import { waterfall } from "./trace.js";

const KEPT = 200;

export async function show(main, [key], signal) {
  watch([]);
  const detail = key && h("section", { "aria-label": "One request" }, await one(key, signal));
  const all = await read("ui/api/requests", { signal });
  const which = h("select", { "aria-label": "Which requests", onchange: () => fill() },
    Object.keys(all).map((name) => h("option", {}, name)));
  const rows = grid("Requests", {
    status: pill,
    request: ({ key: id, request_id: name }) => h("a", { href: `#/requests/${encode(id)}`, "aria-current": String(id === key) }, name || "(no id)"),
  });
  const fill = () => rows.fill(all[which.value].map((line) => ({ at: clock(line.unix_ms), ms: line.ms, status: line.status,
    graph: `${line.graph}/${line.version}`, request: line, path: line.error || line.path })));
  const hold = h("input", { type: "checkbox" });
  live.addEventListener("tick", ({ detail: { requests } }) => {
    all.recent = [...requests.toReversed(), ...all.recent].slice(0, KEPT);
    if (!hold.checked && !rows.node.contains(document.activeElement) && !rows.node.matches(":hover")) fill();
  }, { signal });
  fill();
  main.replaceChildren(h(key ? "div.split" : "div.sheet", {}, h("section", { "aria-label": "Requests" }, h("div.title", {}, h("h1", {}, "Requests"), which,
    h("label", {}, hold, " hold")), rows.node), detail));
}

async function one(key, signal) {
  const request = await read(`ui/api/requests/${encode(key)}`, { signal });
  const { jaeger } = document.body.dataset;
  const link = jaeger && request.trace_id && h("a", { href: `${jaeger}/trace/${encode(request.trace_id)}`, target: "_blank", rel: "noreferrer" }, "In Jaeger");
  return [h("h2", {}, `${request.graph} ${request.request_id} `, pill(request.status)), facts({ at: clock(request.unix_ms), took: `${num(request.ms)} ms`,
    path: request.path, error: request.error, trace: link }), waterfall(request.steps, request.ms)];
}
