// Graphs: the list with a filter, the chosen one alive, and what stands behind a step.

import { control, encode, known, latest, live, read, watch } from "./api.js";
import { bar, clock, facts, folded, grid, h, num, percent, pill, put } from "./dom.js";
import { Picture } from "./picture.js";

const id = (graph) => `${graph.name}/${graph.version}`;
const place = (graph) => `#/graphs/${encode(graph.name)}/${encode(graph.version)}`;
let list;

export async function show(main, [name, version, ...step], signal) {
  const { index } = await known(signal);
  const chosen = index.find((one) => one.is_graph && (!name || one.name === name) && (!version || one.version === version));
  if (!chosen) throw new Error(name ? `there is no graph '${name}'` : "no graph is served");
  watch([chosen.name]);
  const graph = await read(`ui/api/graphs/${encode(chosen.name)}?version=${encode(chosen.version)}`, { signal });
  list ??= makeList();
  list.choose(chosen);
  main.replaceChildren(h("div.graphs", {}, list.node, page(graph, step.join("/"), signal)));
}

/** Made once, so that the filter stays. */
function makeList() {
  const [items, found] = [h("ul"), h("small", { role: "status" })];
  const filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter graphs", oninput: () => sift() });
  const rows = new Map();
  const sift = () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const [key, row] of rows) row.hidden = !words.every((word) => key.toLowerCase().includes(word));
    put(found, `${items.querySelectorAll("li:not([hidden])").length} of ${rows.size} graphs`);
  };
  const fill = () => {
    const current = items.querySelector("[aria-current=true]")?.hash;
    rows.clear();
    for (const graph of latest.state.index.filter((one) => one.is_graph)) {
      const bad = graph.state !== "READY" && h("span", { title: graph.reason }, pill(graph.state));
      rows.set(id(graph), h("li", {}, h("a", { href: place(graph), "aria-current": String(place(graph) === current) },
        h("span", {}, graph.name, " ", h("small", {}, graph.version)), bad, h("span.n"))));
    }
    items.replaceChildren(...rows.values());
    sift();
  };
  live.addEventListener("state", fill);
  live.addEventListener("tick", ({ detail: { graphs } }) => {
    const busy = new Map(graphs.map((graph) => [id(graph), `${graph.errors ? "▲ " : ""}${num(graph.rate)}/s`]));
    for (const [key, row] of rows) put(row.querySelector(".n"), busy.get(key) ?? "");
  });
  fill();
  const choose = (graph) => rows.forEach((row, key) => row.firstChild.setAttribute("aria-current", String(key === id(graph))));
  return { node: h("nav.list", { "aria-label": "Graphs" }, filter, found, items), choose };
}

function page(graph, step, signal) {
  const [figures, cards] = [h("p.figures"), h("div.cards")];
  const side = h("aside");
  const made = new Map();
  let refresh = () => {};
  const pick = (path) => {
    const found = graph.steps.find((one) => one.path === path);
    history.replaceState(null, "", [place(graph), ...(found ? path.split("/").map(encode) : [])].join("/"));
    picture.select(path);
    side.hidden = !found;
    refresh = found ? panel(side, found, () => pick("")) : () => {};
    if (latest.tick) tick({ detail: latest.tick });
  };
  const tick = ({ detail: { looked_at: graphs, models } }) => {
    const now = graphs.find((one) => id(one) === id(graph));
    if (!now) return;
    put(figures, [`${num(now.rate)} requests/s`, `p50 ${num(now.p50_ms)} ms`, `p99 ${num(now.p99_ms)} ms`, `${now.inflight} in flight`,
      `${now.errors ? "▲ " : ""}${percent(now.rate ? now.errors / now.rate : 0)} errors`].join(" · "));
    picture.update(now, models);
    refresh(now.steps, models);
    const bandits = [...new Set(now.arms.map((arm) => arm.node))].map((node) => [node, bandit, now.arms.filter((arm) => arm.node === node)]);
    for (const [key, make, value] of [...now.rollouts.map((one) => [`${one.node} ${one.candidate}`, rollout, one]), ...bandits]) {
      if (!made.has(key)) made.set(key, make(cards.appendChild(h("section.card")), value));
      made.get(key)(value);
    }
  };
  const picture = new Picture(graph, pick);
  live.addEventListener("tick", tick, { signal });
  pick(step);
  return h("section.graph", { "aria-label": `Graph ${graph.name}` },
    h("div.title", {}, h("h1", {}, graph.name, " ", h("small", {}, `version ${graph.version}`)), figures,
      h("a.button", { href: `#/try/${encode(graph.name)}` }, "Try it")),
    h("div.stage", {}, h("div.scroll.picture", { tabindex: "0", role: "region", "aria-label": "Picture" }, picture.node), side),
    cards, graph.files.map((file) => folded(file.file, h("pre", {}, file.text))));
}

/** The side panel of a step; returns what writes its numbers. */
function panel(side, step, close) {
  const [numbers, more] = [h("div"), h("div")];
  side.setAttribute("aria-label", step.title || step.name);
  side.replaceChildren(
    h("div.title", {}, h("h2", {}, step.title || step.name), h("button", { type: "button", onclick: close, "aria-label": "Close" }, "✕")), numbers,
    facts({ path: step.path, in: `${step.kind} ${step.node}`, model: step.model && `${step.model} version ${step.model_version}`,
      target: step.target, shadow: step.is_shadow && "its answers are dropped", "fallback of": step.fallback_of }),
    h("ul", {}, step.lines.map((line) => h("li", {}, line))), more);
  if (step.model) void model(step).then((parts) => more.replaceChildren(...parts), (error) => put(more, `▲ ${error.message}`));
  const rates = (counts = {}) => Object.entries(counts).map(([name, value]) => `${name} ${num(value)}/s`).join(", ");
  return (steps, models) => {
    const now = steps[step.path] ?? {};
    const served = models.find((row) => row.name === step.model && row.version === step.model_version);
    put(numbers, facts({ runs: `${num(now.rate ?? 0)}/s`, p50: `${num(now.p50_ms)} ms`, p99: `${num(now.p99_ms)} ms`,
      share: now.share != null && percent(now.share), accepted: now.accepted != null && percent(now.accepted),
      skipped: now.skipped && `${num(now.skipped)}/s`, errors: now.errors ? `▲ ${rates(now.failures)}` : "none", events: rates(now.events),
      queue: served && `${num(served.queue)}, p99 ${num(served.queue_p99_ms)} ms`, batch: served && `${num(served.batch)} rows` }));
  };
}

async function model(step) {
  const path = `v2/models/${encode(step.model)}/versions/${encode(step.model_version)}`;
  const [machines, metadata, config] = await Promise.all(["ui/api/machines", path, `${path}/config`].map((one) => read(one)));
  const replicas = grid("Replicas", { target: null, state: pill });
  replicas.fill(machines.replicas.filter((one) => one.target === step.target));
  const tensors = (all) => all.map((one) => `${one.name} ${one.datatype} [${one.shape}]`).join(", ");
  return [facts({ versions: metadata.versions.join(", "), platform: metadata.platform, takes: tensors(metadata.inputs),
    gives: tensors(metadata.outputs) }), replicas.node, folded("Configuration", h("pre", {}, JSON.stringify(config, null, 2)))];
}

function bandit(card, [{ node }]) {
  const rows = grid(`Arms of ${node}`, { node: null });
  card.append(h("h2", {}, `Bandit ${node}`), rows.node);
  return (arms) => rows.fill(arms.map(({ step, ...arm }) => ({ step, ...numbers(arm), mean_reward: arm.reward_sum / arm.num_rewards })));
}

/** Integers of 64 bits come as text. */
const numbers = (arm) => Object.fromEntries(Object.entries(arm ?? {}).map(([name, value]) => [name, Number(value)]));

/** A rollout: how it stands, why, both sides, its guards, and the buttons that are allowed. */
function rollout(card, { graph, node, candidate }) {
  const [phase, share, track, verdict] = [h("span"), h("p"), h("div.track", { "aria-hidden": "true" }), h("p")];
  const [sides, guards, history] = [grid("Both sides"), grid("Guards", { is_broken: (broken) => (broken ? "▲ broken" : "● kept") }), h("ul")];
  const act = (action, question) => h("button", { type: "button", value: action, disabled: !latest.state.actions.includes("rollout"),
    onclick: () => control({ action, name: graph, node, reason: "by hand" }, question) }, action);
  const buttons = [act("pause"), act("resume"),
    act("promote", [`Promote ${candidate}?`, "It gets its next share of the requests at once, whatever the guards say.", "Promote"]),
    act("abort", [`Abort ${candidate}?`, "It gets no more requests.", "Abort"])];
  card.append(h("h2", {}, `Rollout of ${candidate} at ${node} `, phase), share, track, verdict, sides.node, guards.node,
    folded("Earlier", history), h("menu", {}, latest.state.actions.includes("rollout") && buttons));
  return (now) => {
    put(phase, pill(now.phase));
    put(share, `${num(now.percent)} % of the requests · step ${now.step + 1} of ${now.num_steps} · since ${clock(now.changed_unix_ns / 1e6)}`);
    put(track, bar(now.percent / 100));
    put(verdict, now.verdict);
    sides.fill([{ side: "candidate", ...numbers(now.candidate_arm) }, { side: "baseline", ...numbers(now.baseline_arm) }]);
    guards.fill(now.guard);
    history.replaceChildren(...now.history.map((line) => h("li", {}, line)));
    for (const button of buttons) {
      const useless = { PAUSED: ["pause"], RUNNING: ["resume"] }[now.phase] ?? ["pause", "resume", "promote", "abort"];
      button.disabled = useless.includes(button.value);
    }
  };
}
