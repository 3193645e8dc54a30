// Models and machines: what is served, where, how full; load, unload and roll back where it is allowed.

import { control, known, latest, live, read, watch } from "./api.js";
import { bar, grid, h, histogram, num, percent, pill, track } from "./dom.js";

const EVERY_MS = 2000;
const QUESTIONS = {
  unload: (name) => [`Unload ${name}?`, "It answers no more requests until it is loaded again.", "Unload"],
  rollback: (name) => [`Roll back ${name}?`, "What served before is served again.", "Roll back"],
};

export async function show(main, _, signal) {
  watch([]);
  const { actions } = await known(signal);
  const allowed = ["load", "unload", "rollback"].filter((action) => actions.includes(action));
  const buttons = (name) => h("menu", {}, allowed.map((action) => h("button", { type: "button", "aria-label": `${action} ${name}`,
    onclick: () => control({ action, name }, QUESTIONS[action]?.(name)) }, action)));
  const parts = {
    Services: grid("Services", { error: null, is_up: (isUp, one) => pill(isUp ? "serving" : one.error || "down") }),
    "Models, by priority": grid("Models", { is_degraded: (isDegraded) => (isDegraded ? "▲ yes" : "no") }),
    Replicas: grid("Replicas", { state: pill }),
    "Batches: rows, and how often": grid("Batches", { executions: histogram }),
    "Ranks of language models": grid("Ranks"),
    "Instances that compute for others": grid("Roles"),
    "Caches, memory, GPU, instances, warm pool": grid("Gauges", { value: gauge }),
    "What is loaded": grid("Loaded", { state: pill, actions: buttons }),
  };
  const fill = async () => {
    const [machines, { model_stats: counts = [] }] = await Promise.all(["ui/api/machines", "v2/models/stats"].map((path) => read(path, { signal })));
    const gauges = machines.gauges.filter((one) => !one.name.startsWith("weft_endpoint")).map(({ labels, ...one }) =>
      ({ ...one, of: Object.entries(labels).map((pair) => pair.join(" ")).join(", ") }));
    const batches = counts.filter((one) => one.batch_stats.length).map((one) => ({ model: one.name, version: one.version,
      executions: one.batch_stats.map((size) => [size.batch_size, size.compute_infer.count]) }));
    const loaded = latest.state.index.map(({ is_graph: isGraph, ...one }) =>
      ({ kind: isGraph ? "graph" : "model", ...one, ...(allowed.length && { actions: one.name }) }));
    const models = machines.models.filter((one) => one.kind !== "call" || !machines.models.some((other) => other.kind === "model" && other.model === one.model));
    const rows = [machines.services, models, replicasOf(machines), batches, machines.ranks, machines.roles, gauges, loaded];
    Object.values(parts).forEach((part, i) => part.fill(rows[i]));
  };
  await fill();
  const timer = setInterval(() => void fill().catch(() => {}), EVERY_MS); // the banner says what is wrong
  live.addEventListener("state", fill, { signal });
  signal.addEventListener("abort", () => clearInterval(timer));
  main.replaceChildren(h("div.sheet", {}, h("h1", {}, "Models and machines"),
    Object.entries(parts).map(([title, part]) => h("section", {}, h("h2", {}, title), part.node))));
}

/** The servers behind each target, of the gauges of the router. */
export function replicasOf({ gauges }) {
  const value = (name, { target, endpoint }) => gauges.find((one) => one.name === name && one.labels.target === target
    && one.labels.endpoint === endpoint)?.value ?? 0;
  return gauges.filter((one) => one.name === "weft_endpoint_state").map(({ labels }) => ({ ...labels,
    inflight: value("weft_endpoint_inflight", labels), picks: value("weft_endpoint_picks_total", labels) }));
}

const gauge = (value, { name }) => (/usage|utili[sz]ation/.test(name)
  ? h("div.gauge", {}, track(bar(value)), h("span.n", {}, percent(value)))
  : /bytes/.test(name) ? `${num(value / 2 ** 20)} MiB` : num(value));
