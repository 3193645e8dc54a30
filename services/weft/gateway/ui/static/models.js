// Models and machines: what is served, where, how full; load, unload and roll back where it is allowed.

import { control, known, latest, live, read, watch } from "./api.js";
import { bar, grid, h, histogram, num, percent, pill } from "./dom.js";

const EVERY_MS = 2000;
const QUESTIONS = {
  unload: (name) => [`Unload ${name}?`, "It answers no more requests until it is loaded again.", "Unload"],
  rollback: (name) => [`Roll back ${name}?`, "What served before is served again.", "Roll back"],
};

export async function show(main, _, signal) {
  watch([]);
  const { actions } = await known(signal);
  const buttons = (name) => h("menu", {}, ["load", "unload", "rollback"].filter((action) => actions.includes(action)).map((action) =>
    h("button", { type: "button", "aria-label": `${action} ${name}`, onclick: () => control({ action, name }, QUESTIONS[action]?.(name)) }, action)));
  const health = (error, line) => pill(line.is_up ? "serving" : error || "down");
  const parts = {
    services: [grid("Services", { is_up: null, error: health }), "Services"],
    models: [grid("Models and graphs", { is_degraded: (bad) => (bad ? "▲ yes" : "no") }), "Models, by priority"],
    replicas: [grid("Replicas", { state: pill }), "Replicas"],
    batches: [grid("Batches", { sizes: (sizes) => histogram(sizes) }), "Batches: rows and how often"],
    ranks: [grid("Ranks"), "Ranks of language models"],
    roles: [grid("Roles"), "Instances that compute for others"],
    gauges: [grid("Gauges", { labels: (labels) => Object.entries(labels).map((pair) => pair.join("=")).join(" "), value: gauge }),
      "KV cache, memory, GPU, instances, warm pool"],
  };
  const index = grid("What is loaded", { is_graph: (isGraph) => (isGraph ? "graph" : "model"), state: pill, actions: (name) => buttons(name) });
  const fillIndex = () => index.fill(latest.state.index.map((one) => (actions.length ? { ...one, actions: one.name } : one)));
  live.addEventListener("state", fillIndex, { signal });
  const fill = async () => {
    const machines = await read("ui/api/machines", { signal });
    for (const [name, [rows]] of Object.entries(parts)) rows.fill(machines[name]);
  };
  await fill();
  fillIndex();
  const timer = setInterval(() => void fill().catch(() => {}), EVERY_MS); // the banner says what is wrong
  signal.addEventListener("abort", () => clearInterval(timer));
  const section = ([rows, title]) => h("section", {}, h("h2", {}, title), rows.node);
  main.replaceChildren(h("div.sheet", {}, h("h1", {}, "Models and machines"), section([index, "What is loaded"]), Object.values(parts).map(section)));
}

const gauge = (value, { name }) => (/usage|utili[sz]ation|ratio/.test(name) && value <= 1
  ? h("div.gauge", {}, h("div.track", {}, bar(value)), h("span.n", {}, percent(value)))
  : /bytes/.test(name) ? `${num(value / 2 ** 20)} MiB` : num(value));
